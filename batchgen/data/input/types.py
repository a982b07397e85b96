"""Which Arrow types mean the same thing, and how a column is brought to one of them.

Writers disagree about text (``string``, ``large_string``, ``string_view``, dictionaries)
and about columns that happen to hold only nulls in one file. The rest of the house sees
one type for each column, whatever file a row comes from.
"""

import pyarrow as pa


def is_text(kind: pa.DataType) -> bool:
    """Whether values of this type are text, dictionary-encoded or not."""
    if pa.types.is_dictionary(kind):
        return is_text(kind.value_type)
    return bool(
        pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    )


def normalize_type(kind: pa.DataType) -> pa.DataType:
    """Give the plain type for a type as it stands in a file.

    Dictionaries become their values, extension types (such as JSON) what they are stored as.
    ``string_view`` becomes ``string``, and so do bytes, as which some writers store text. Inside
    lists, maps and structs as well. Everything else stays as it is.
    """
    inside = getattr(kind, "value_type", None) if pa.types.is_dictionary(kind) else None
    inside = kind.storage_type if isinstance(kind, pa.BaseExtensionType) else inside
    if inside is not None:
        return normalize_type(inside)
    if pa.types.is_map(kind):
        return pa.map_(normalize_type(kind.key_type), normalize_type(kind.item_type))
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(normalize_type(field.type)) for field in kind])
    if _is_list(kind):
        return _list_like(kind, normalize_type(kind.value_type))
    return _plain_text(kind)


def _plain_text(kind: pa.DataType) -> pa.DataType:
    """Return the type of text for views and bytes, else the type itself."""
    if pa.types.is_large_binary(kind):
        return pa.large_string()
    return pa.string() if pa.types.is_string_view(kind) or _is_bytes(kind) else kind


def without_views(kind: pa.DataType) -> pa.DataType:
    """Give the type with plain text, bytes and lists in the place of their views.

    A dictionary stays one where it is the whole column; inside other types it becomes its
    values, since Arrow cannot bring dictionaries of several batches together there.
    """
    if pa.types.is_dictionary(kind):
        return pa.dictionary(kind.index_type, without_views(kind.value_type), kind.ordered)
    plain = _without_views(kind)
    return kind if plain.equals(kind) else plain


def _without_views(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_dictionary(kind):
        return _without_views(kind.value_type)
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_without_views(field.type)) for field in kind])
    if pa.types.is_map(kind):
        return pa.map_(_without_views(kind.key_type), _without_views(kind.item_type))
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(_without_views(kind.value_type), kind.list_size)
    lists = {
        pa.list_: pa.types.is_list(kind) or pa.types.is_list_view(kind),
        pa.large_list: pa.types.is_large_list(kind) or pa.types.is_large_list_view(kind),
    }
    make = next((make for make, fits in lists.items() if fits), None)
    if make is not None:
        return make(_without_views(kind.value_type))
    return {pa.string_view(): pa.string(), pa.binary_view(): pa.binary()}.get(kind, kind)


def _list_like(kind: pa.DataType, values: pa.DataType) -> pa.DataType:
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(values, kind.list_size)
    return pa.large_list(values) if pa.types.is_large_list(kind) else pa.list_(values)


def common_type(left: pa.DataType, right: pa.DataType) -> pa.DataType | None:
    """Give the type that holds the values of both normalized types, or None.

    Nothing is lost: a wider integer, the longer text offsets, a struct with the fields of
    both. An integer column beside a floating one becomes double, since a nullable integer
    column often comes out of other tools as a floating one.
    """
    if left.equals(right) or pa.types.is_null(right):
        return left
    if pa.types.is_null(left):
        return right
    if pa.types.is_integer(left) and pa.types.is_integer(right):
        return _common_integer(left, right)
    joins = (
        (is_text, _common_text),
        (_is_number, _common_number),
        (_is_list, _common_list),
        (pa.types.is_struct, _common_struct),
    )
    return next((join(left, right) for is_a, join in joins if is_a(left) and is_a(right)), None)


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


def _is_list(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    )


def _common_text(_left: pa.DataType, _right: pa.DataType) -> pa.DataType:
    return pa.large_string()


def _common_number(_left: pa.DataType, _right: pa.DataType) -> pa.DataType:
    return pa.float64()


def _common_integer(left: pa.DataType, right: pa.DataType) -> pa.DataType | None:
    signs = pa.types.is_signed_integer(left), pa.types.is_signed_integer(right)
    if signs[0] == signs[1]:
        return left if left.bit_width >= right.bit_width else right
    signed, unsigned = (left, right) if signs[0] else (right, left)
    bits = max(signed.bit_width, unsigned.bit_width * 2)
    return {16: pa.int16(), 32: pa.int32(), 64: pa.int64()}.get(bits)


def _common_list(left: pa.DataType, right: pa.DataType) -> pa.DataType | None:
    values = common_type(left.value_type, right.value_type)
    if values is None:
        return None
    is_large = pa.types.is_large_list(left) or pa.types.is_large_list(right)
    return pa.large_list(values) if is_large else pa.list_(values)


def _common_struct(left: pa.DataType, right: pa.DataType) -> pa.DataType | None:
    fields = {field.name: field.type for field in left}
    for field in right:
        kind = common_type(fields[field.name], field.type) if field.name in fields else field.type
        if kind is None:
            return None
        fields[field.name] = kind
    return pa.struct(list(fields.items()))


def conform(array: pa.Array, kind: pa.DataType) -> pa.Array:
    """Bring a column of a file to its common type; bytes become text unchecked.

    Raises:
        pyarrow.ArrowInvalid: the values do not fit, as with more than 2 GiB of text in
            one array of ``string``.
    """
    if array.type.equals(kind):
        return array
    if isinstance(array.type, pa.BaseExtensionType):
        array = array.storage
    if pa.types.is_dictionary(array.type) and not pa.types.is_dictionary(kind):
        array = array.dictionary_decode()
    if _is_bytes(array.type) and is_text(kind) and not pa.types.is_dictionary(kind):
        raw = pa.large_binary() if pa.types.is_large_string(kind) else pa.binary()
        array = array.cast(raw).view(kind)
    return array if array.type.equals(kind) else array.cast(kind)


def _is_bytes(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind)
    )


def replace_invalid_text(array: pa.Array) -> pa.Array:
    """Replace bytes that are not UTF-8 by U+FFFD; Parquet files may hold them unchecked."""
    if not is_text(array.type):
        return array
    try:
        array.validate(full=True)
    except pa.ArrowInvalid:
        raw = array.cast(pa.large_binary() if pa.types.is_large_string(array.type) else pa.binary())
        texts = (
            None if value is None else value.decode(errors="replace") for value in raw.to_pylist()
        )
        return pa.array(texts, array.type)
    return array
