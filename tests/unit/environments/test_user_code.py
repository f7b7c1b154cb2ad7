"""What a user's function imports while it runs."""

from grpo_mcore.environments.user_code import imported_when_called
from tests.unit.environments.rules import judges


def test_the_modules_that_a_function_imports_when_it_is_called() -> None:
    assert imported_when_called(judges.imports_late) == ["tests.unit.environments.slow_to_import"]
    assert imported_when_called(judges.waits) == []
