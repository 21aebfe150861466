"""The description of a table says which columns a batch has, which a stored row has, and refuses what cannot be stored."""

import pyarrow as pa
import pytest

from schemas.table import STORED_AS, TableSchema, column, tensor

NAME = column("name", pa.string(), "the key")
SHAPE = column("shape", pa.list_(pa.int32()), "shape")
IDS_SHAPE = column("ids_shape", pa.list_(pa.int32()), "shape of ids")


def test_a_table_without_tensors_has_one_schema_for_batches_and_stored_rows():
    schema = TableSchema(name="t", doc="", key=("name",), columns=(NAME,))
    assert schema.batch == schema.stored == pa.schema([NAME]) and schema.locator == ()


def test_a_batch_carries_tensors_and_a_stored_row_says_where_they_lie():
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


@pytest.mark.parametrize("dtype", STORED_AS)
def test_a_tensor_of_every_dtype_is_a_list_of_its_stored_type(dtype):
    assert tensor("x", dtype).field.type.value_type == STORED_AS[dtype]


def test_a_dtype_that_cannot_be_stored_is_refused_with_those_that_can():
    with pytest.raises(AssertionError, match=r"x: dtype must be one of bfloat16, .*, got complex64"):
        tensor("x", "complex64")


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


def test_rows_become_a_batch_with_defaults_and_without_gaps():
    split = column("split", pa.string(), "", default="train")
    schema = TableSchema(name="t", doc="", key=("name",), columns=(NAME, split))
    assert schema.record_batch([{"name": "a"}, {"name": "b", "split": "test"}])["split"].to_pylist() == ["train", "test"]
    with pytest.raises(AssertionError, match=r"t: columns \['name'\] are missing or unknown"):
        schema.record_batch([{"split": "train"}])


def test_an_unrecorded_column_is_not_in_the_recipe_and_null_where_a_row_does_not_say_it():
    schema = TableSchema(name="t", doc="", key=("name",), columns=(NAME, column("use", pa.string(), "", unrecorded=True)))
    assert schema.recorded == {"name": "string"}
    assert schema.record_batch([{"name": "a"}])["use"].to_pylist() == [None]
