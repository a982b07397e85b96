"""What ``mode=preview`` shows: the prompts as the model will see them."""

from batchgen.prompts.store import PromptStore
from batchgen.prompts.tokenizer import Tokenizer


def preview(store: PromptStore, tokenizer: Tokenizer | None, rows: int) -> str:
    """Show the first rows: text decoded from the ids, special tokens included, and ids.

    Args:
        tokenizer: None where the rows carry token ids and the model has no tokenizer.
        rows: store rows shown at most.
    """
    return "\n\n".join(_show(store, tokenizer, row) for row in range(min(rows, store.num_rows)))


def _show(store: PromptStore, tokenizer: Tokenizer | None, row: int) -> str:
    head = f"row {store.row_index[row]}, id {store.row_ids[row].as_py()!r}"
    error = store.error(row)
    if error is not None:
        return f"{head}: {error.type.value}: {error.message}"
    ids = store.ids(row).tolist()
    overrides = store.sampling_params[row].as_py()
    cut = int(store.cut_tokens[row])
    notes = [
        f"{len(ids)} tokens",
        f"{cut} cut off" if cut else "",
        overrides and f"sampling {overrides}",
    ]
    lines = [f"{head}: {', '.join(filter(None, notes))}"]
    if tokenizer is not None:
        text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        lines.append(text)
    lines.append(f"token ids: {ids}")
    return "\n".join(lines)
