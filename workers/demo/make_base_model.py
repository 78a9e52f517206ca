"""Makes the demo's base model, which is shipped in `workers/demo/models/calculator`; takes about a minute.

After a change of chat template, transcripts, tokenizer or warm start, a test names what changed. Then run::

    python -m workers.demo.make_base_model
"""

import itertools
import tempfile
from pathlib import Path

from workers.base_models.shipped import content_hash, store_base_model
from workers.base_models.small_model import CHAT_TEMPLATE
from workers.demo.model import SIZES, make_model
from workers.demo.transcripts import transcripts
from workers.demo.warm_start import SCHEDULE, warm_start

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
