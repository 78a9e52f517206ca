"""Makes the demo's base model, which is shipped in `workers/demo/models/calculator`; takes about a minute.

After a change of chat template, transcripts, tokenizer or warm start, a test names what changed. Then run::

    python -m tests.base_models.make_demo_model
"""

import itertools
import tempfile
from pathlib import Path

from tests.base_models.demo_model import SIZES, make_model
from tests.base_models.demo_transcripts import transcripts
from tests.base_models.small_model import CHAT_TEMPLATE
from tests.base_models.warm_start import SCHEDULE, warm_start
from workers.demo.base_models import content_hash, store_base_model

SEED = 1
STEPS = 1200
_HASHED = 200
"""Number of transcripts of each kind that the hash covers."""


def made_from(tokenizer: str) -> dict[str, str]:
    """Return hashes of what determines the model.

    Args:
        tokenizer: content of the `tokenizer.json` that `make_model` writes.
    """
    return {
        "chat_template": content_hash(CHAT_TEMPLATE),
        "tokenizer": content_hash(tokenizer),
        "transcripts": content_hash(
            [list(itertools.islice(transcripts(SEED, habit=habit), _HASHED)) for habit in (False, True)]
        ),
        "sizes": content_hash(SIZES),
        "warm_start": content_hash([SEED, STEPS, SCHEDULE]),
    }


def main() -> None:
    """Make the model and store it in the package."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        make_model(folder, SEED)
        warm_start(folder, SEED, STEPS, threads=1)
        store_base_model("calculator", folder, made_from((folder / "tokenizer.json").read_text()))


if __name__ == "__main__":
    main()
