"""What a policy may do to its verifier, on a real engine: no reward is forged unseen, and none is left unmeasured.

An attack writes no right answer. It is worth 0, or the files by which it forged are shown with the completion.
"""

from pathlib import Path
from typing import NamedTuple

import pytest

from envs.harbor.environment import Harbor
from stream.validity import Measured
from tests.cases.folder_sandboxes import direct_sandboxes
from tests.cases.harbor_tasks import write_task

pytestmark = [pytest.mark.anyio, pytest.mark.sandboxes, pytest.mark.timeout(240)]

SETTINGS = """
[verifier]
timeout_sec = 5
[environment]
docker_image = "penstock-tasks:{image}"
workdir = "/work"
memory_mb = 256
storage_mb = 200
"""
SHELL = """#!/bin/sh
if /bin/grep -q '^42$' /work/answer.txt; then reward=1; else reward=0; fi
echo "$reward" >/logs/verifier/reward.txt
"""
PYTHON = "#!/bin/sh\npython3 /tests/check.py\n"
CHECK = """
import pathlib
import subprocess
right = subprocess.run(["grep", "-q", "^42$", "/work/answer.txt"]).returncode == 0
pathlib.Path("/logs/verifier/reward.txt").write_text(str(int(right)))
"""


class Attack(NamedTuple):
    command: str
    image: str = "busybox"
    forges: bool = False
    """It gets the reward, and is shown."""


FORGE = "echo 1 >/logs/verifier/reward.txt"
WRITER = f"while :; do mkdir -p /logs/verifier; {FORGE}; echo 1 >/logs/verifier/reward.json; sleep .1; done"
SHELL_BY = "mkdir /x; cp /bin/busybox /x/sh; rm /bin/sh; touch /bin/sh; chmod 755 /bin/sh; printf '#!/x/sh\\n"
QUICK = {
    "writer left behind": Attack(f"({WRITER}) >/dev/null 2>&1 & sleep .5"),
    "json before txt": Attack("mkdir -p /logs/verifier; echo 1 >/logs/verifier/reward.json"),
    "linked folder": Attack(
        "mkdir /fake; echo 1 >/fake/reward.json; rm -rf /logs/verifier; ln -s /fake /logs/verifier"
    ),
    "deleted shell": Attack("rm -f /bin/busybox /bin/sh"),
    "replaced tool": Attack(
        "rm /bin/grep; printf '#!/bin/sh\\nexit 0\\n' >/bin/grep; chmod 755 /bin/grep", forges=True
    ),
    "endless test": Attack("mkfifo /work/answer.txt"),
}
FULL = {
    "writer in a session of its own": Attack(f"setsid sh -c '(({WRITER}) &) &' >/dev/null 2>&1; sleep .5"),
    "own tests": Attack(f"mkdir /tests; printf '#!/bin/sh\\n{FORGE}\\n' >/tests/test.sh; chmod -R 777 /tests"),
    "linked tests": Attack(f"mkdir /fake; printf '#!/bin/sh\\n{FORGE}\\n' >/fake/test.sh; ln -s /fake /tests"),
    "linked logs": Attack(
        "mkdir -p /fake/verifier; echo 1 >/fake/verifier/reward.json; rm -rf /logs; ln -s /fake /logs"
    ),
    "linked reward": Attack("echo 1 >/work/one; mkdir -p /logs/verifier; ln -s /work/one /logs/verifier/reward.txt"),
    "huge reward": Attack("mkdir -p /logs/verifier; head -c 50000000 /dev/zero >/logs/verifier/reward.json"),
    "endless reward": Attack("mkdir -p /logs/verifier; ln -s /dev/zero /logs/verifier/reward.json"),
    "endless answer": Attack("ln -s /dev/zero /work/answer.txt"),
    "tool before another": Attack(
        "mkdir -p /usr/local/bin; printf '#!/bin/sh\\nexit 0\\n' >/usr/local/bin/grep; chmod 755 /usr/local/bin/grep",
        "python",
        forges=True,
    ),
    "rm that removes nothing": Attack(
        f"mkdir -p /logs/verifier; {FORGE}; rm /bin/rm; printf '#!/bin/sh\\nexit 0\\n' >/bin/rm; chmod 755 /bin/rm"
    ),
    "shell that forges": Attack(
        SHELL_BY + '[ -d /tests ] && echo 1 >/logs/verifier/reward.json\\nexec /x/sh "$@"\\n\' >/bin/sh', forges=True
    ),
    "shell that ends": Attack(SHELL_BY + "exit 137\\n' >/bin/sh"),
    "shell that is none": Attack(
        "mv /bin/busybox /bin/bb; printf '#!/bin/bb sh\\n' >/bin/sh; /bin/bb chmod 755 /bin/sh"
    ),
    "sitecustomize": Attack(
        "cd $(python3 -c 'import sysconfig; print(sysconfig.get_path(\"stdlib\"))'); "
        'printf \'import os\\nif os.path.isdir("/tests"):\\n    open("/logs/verifier/reward.txt", "w").write("1")\\n'
        "    os._exit(0)\\n' >sitecustomize.py",
        "python",
        forges=True,
    ),
    "changed library": Attack(
        "echo 'import os; os._exit(0)' >>$(python3 -c 'import pathlib; print(pathlib.__file__)')", "python"
    ),
    "ld.so.preload": Attack("cp /bin/busybox /work/lib.so; echo /work/lib.so >/etc/ld.so.preload", "python"),
    "deleted Python": Attack("rm -f /usr/local/bin/python3*", "python"),
    "deleted library": Attack("rm -rf /usr/local/lib/python3*", "python"),
    "deleted everything": Attack("rm -rf /bin /etc /usr /root /var /home 2>/dev/null"),
    "deleted users": Attack("rm -f /etc/passwd /etc/group"),
    "killed first process": Attack("kill -9 1; kill -TERM 1; kill -9 -1"),
    "fork bomb": Attack("bomb() { bomb | bomb & }; bomb"),
    "full disk": Attack("dd if=/dev/zero of=/work/full bs=1M count=300"),
    "full memory": Attack("head -c 1000000000 /dev/zero | tail -c 900000000 >/dev/null; tail /dev/zero"),
    "many files": Attack("mkdir /work/many; cd /work/many; seq 1 20000 | xargs touch"),
    "deep folders": Attack("cd /work; for i in $(seq 1 900); do mkdir d; cd d; done"),
    "runner's files": Attack(
        "find / -xdev -path '*penstock*' -not -path '/proc/*' -exec rm -rf {} + 2>/dev/null; true"
    ),
    "network user": Attack("nc -l -p 80 </dev/zero >/dev/null 2>&1 & sleep .2"),
}
CASES = [pytest.param(attack, id=name) for name, attack in QUICK.items()]
CASES += [pytest.param(attack, id=name, marks=pytest.mark.full) for name, attack in FULL.items()]


def task(folder: Path, image: str) -> Path:
    tests = {"tests/test.sh": SHELL} if image == "busybox" else {"tests/test.sh": PYTHON, "tests/check.py": CHECK}
    return write_task(folder / image, SETTINGS.format(image=image), **tests)


async def attacked(place, folder: Path, *commands: str) -> tuple[object, Harbor]:
    """Return the reward of an episode of these commands."""
    env = Harbor(str(folder), allow_unchecked=True, command_timeout_s=8)
    async with direct_sandboxes(place.provider, place.labels()) as sandboxes:
        await env.reset(str(folder), sandboxes)
        for command in commands:
            try:
                await env.bash(command)
            except Exception as error:
                print(f"{type(error).__name__}: {error}")
        return await env.get_reward(), env


@pytest.mark.parametrize("attack", CASES)
async def test_an_attack_is_worth_nothing_or_is_shown(place, tasks_images, tmp_path, attack):
    reward, env = await attacked(place, task(tmp_path, attack.image), attack.command)
    print(reward, env.tampered_files, env.verifications)
    value = reward.value if isinstance(reward, Measured) else reward
    assert value == (1.0 if attack.forges else 0.0)
    assert env.tampered_files or not attack.forges


@pytest.mark.parametrize("image", ["busybox", "python"])
async def test_the_right_answer_is_worth_1_and_nothing_is_shown(place, tasks_images, tmp_path, image):
    reward, env = await attacked(place, task(tmp_path, image), "echo 42 >answer.txt")
    assert (reward, env.tampered_files) == (1.0, [])


async def test_a_service_that_the_policy_started_answers_its_verifier(place, tasks_images, tmp_path):
    test = (
        '#!/bin/sh\n[ "$(wget -q -O - http://127.0.0.1:8080/)" = hi ] && r=1\necho ${r:-0} >/logs/verifier/reward.txt\n'
    )
    folder = write_task(tmp_path / "task", SETTINGS.format(image="busybox"), **{"tests/test.sh": test})
    assert (await attacked(place, folder, "echo hi >index.html; httpd -p 8080 -h /work"))[0] == 1.0
    assert (await attacked(place, folder, "true"))[0] == 0.0


@pytest.mark.full
async def test_code_that_the_tests_run_as_another_user_cannot_write_the_reward(place, tasks_images, tmp_path):
    test = "#!/bin/sh\nas_nobody() { su -s /bin/sh nobody -c 'sh /work/program'; }\nas_nobody\n"
    test += "as_nobody | grep -q 42 && r=1\necho ${r:-0} >/logs/verifier/reward.txt\n"
    settings = SETTINGS.format(image="busybox").replace("[verifier]", '[verifier]\nuser = "root"')
    folder = write_task(tmp_path / "task", settings, **{"tests/test.sh": test})
    assert (await attacked(place, folder, "echo 'echo 1 >/logs/verifier/reward.json' >program"))[0] == 0.0
    assert (await attacked(place, folder, "echo 'echo 42' >program"))[0] == 1.0
