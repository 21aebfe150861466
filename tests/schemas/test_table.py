"""The description of a table says which columns a batch has, which a stored row has, and refuses what cannot be stored."""

import pyarrow as pa
import pytest

from schemas.table import STORED_AS, TableSchema, column, tensor

NAME = column("name", pa.string(), "the key")
SHAPE = column("shape", pa.list_(pa.int32()), "shape")
IDS_SHAPE = column("ids_shape", pa.list_(pa.int32()), "shape of ids")


def test_a_batch_carries_tensors_and_a_stored_row_says_where_they_lie():
    plain = TableSchema(name="t", doc="", key=("name",), columns=(NAME,))
    assert plain.batch == plain.stored == pa.schema([NAME]) and plain.locator == ()
    schema = TableSchema(
        name="t", doc="", key=("name",), columns=(NAME, SHAPE, IDS_SHAPE), tensors=(tensor(), tensor("ids", "int32", "ids"))
    )
    assert schema.batch.names == ["name", "shape", "ids_shape", "tensor", "ids"]
    assert schema.stored.names == [
        *("name", "shape", "ids_shape"),
        *("shard", "byte_offset", "nbytes", "checksum", "ids_offset", "ids_nbytes", "ids_checksum"),
    ]
    assert str(schema.batch.field("tensor").type) == "list<item: uint16 not null>"
    assert str(schema.batch.field("ids").type) == "list<item: int32 not null>"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"key": ("other",)}, "its key, a tensor's shape or the artifact is not a column"),
        ({"artifact": "path"}, "its key, a tensor's shape or the artifact is not a column"),
        ({"tensors": (tensor("ids", "int32"),)}, "its key, a tensor's shape or the artifact is not a column"),
        ({"columns": (NAME, SHAPE, NAME)}, "two columns have the same name"),
        ({"columns": (NAME, SHAPE, column("nbytes", pa.int64(), ""))}, "two columns have the same name"),
        ({"key": ("name", "shape")}, "has one key column"),
    ],
)
def test_a_schema_that_contradicts_itself_is_refused(changed, message):
    fields = {"name": "t", "doc": "", "key": ("name",), "columns": (NAME, SHAPE), "tensors": (tensor(),)}
    with pytest.raises(AssertionError, match=message):
        TableSchema(**fields | changed)


def test_a_tensor_is_a_list_of_the_stored_type_of_its_dtype_or_refused():
    assert {dtype: tensor("x", dtype).field.type.value_type for dtype in STORED_AS} == STORED_AS
    with pytest.raises(AssertionError, match=r"x: dtype must be one of bfloat16, .*, got complex64"):
        tensor("x", "complex64")


def test_rows_become_a_batch_with_defaults_and_without_gaps_and_an_unrecorded_column_is_null_and_not_in_the_recipe():
    split = column("split", pa.string(), "", default="train")
    schema = TableSchema(name="t", doc="", key=("name",), columns=(NAME, split, column("use", pa.string(), "", unrecorded=True)))
    made = schema.record_batch([{"name": "a"}, {"name": "b", "split": "test"}])
    assert (made["split"].to_pylist(), made["use"].to_pylist()) == (["train", "test"], [None, None])
    assert schema.recorded == {"name": "string", "split": "string"}
    with pytest.raises(AssertionError, match=r"t: columns \['name'\] are missing or unknown"):
        schema.record_batch([{"split": "train"}])
