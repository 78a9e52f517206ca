"""What a process's exit code tells its supervisor."""

import pytest

from stream.errors import DataError, PenstockError, RunMismatchError, ServerError, SettingsError
from workers.launch.process import report_error, run_to_exit_code
from workers.role.exit_codes import ExitCode


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (SettingsError("a"), ExitCode.PERMANENT),
        (DataError("a"), ExitCode.PERMANENT),
        (RunMismatchError("a"), ExitCode.PERMANENT),
        (ServerError("a"), ExitCode.FAILURE),
        (PenstockError("a"), ExitCode.FAILURE),
    ],
)
def test_an_error_that_a_restart_cannot_fix_has_its_own_code(error, code, capsys):
    async def alone() -> ExitCode:
        raise error

    async def in_a_group() -> ExitCode:
        raise ExceptionGroup("tasks", [ExceptionGroup("inner", [error])])

    assert run_to_exit_code(alone) == run_to_exit_code(in_a_group) == code
    assert capsys.readouterr().err.splitlines() == ["error: a"] * 2


def test_a_given_code_is_kept():
    assert report_error(SettingsError("a"), ExitCode.USAGE) == ExitCode.USAGE


def test_an_unexpected_error_is_raised():
    async def main() -> ExitCode:
        raise ExceptionGroup("tasks", [KeyError("a")])

    with pytest.raises(ExceptionGroup):
        run_to_exit_code(main)
