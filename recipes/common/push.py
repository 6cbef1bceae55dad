"""--push_to_hub: the trained adapter with its card, in place of the Trainer's own uploads."""

from collections.abc import Callable

from common.arguments import RecipeTrainingArguments
from common.model import HUB_NAMES
from common.results import RESULTS_FILE
from houlsby_peft import plan_push as take_over


def plan_push(training: RecipeTrainingArguments, model_name: str) -> Callable[..., None]:
    """Checks before the training whether a push can succeed; call it in every process.

    Args:
        training: The arguments, whose output_dir is final.
        model_name: As on the command line.

    Returns:
        What pushes, from the main process, the adapter and the results in a run's output folder, and prints the
        address; it does nothing if nothing is to be pushed. Its second argument is the adapter's folder in there.

    Raises:
        AdapterError: The encoder was loaded from a folder, which others do not have.
        HubError: The name or the token is not good, or the Hub cannot be reached.
    """
    push = take_over(training, HUB_NAMES.get(model_name, model_name))

    def finish(output_dir: str, adapter: str = "adapter") -> None:
        if push is not None and training.process_index == 0:
            print(f"Pushed: {push(f'{output_dir}/{adapter}', results=f'{output_dir}/{RESULTS_FILE}')}")

    return finish
