"""The tables of the pipeline retrieval, in the order of its stages."""

import pyarrow as pa

from schemas.table import FILE_STATE, STEP_COSTS, TableSchema, column, tensor

SOURCES = TableSchema(
    name="sources",
    doc="One row per file below the roots; a file that is not read has a row with the reason.",
    key=("path",),
    columns=(
        column("path", pa.string(), "the name of the root, a slash, and the file's path below the root, with forward slashes"),
        column("root", pa.string(), "name of the root: the last part of a folder's path, or the name of an installed package"),
        column("file", pa.string(), "where the file lies: relative to the project's folder, or absolute"),
        column("module", pa.string(), "dotted name of the file's module; for a language without modules, its path with dots"),
        column("source_id", pa.string(), "sha256 of the file's bytes, hex; empty for a file that was not read"),
        *FILE_STATE,
        column("language", pa.string(), "programming language, by the suffix: python, rust, ...; empty if unknown"),
        column("lines", pa.int32(), "number of lines; 0 for a file that was not read"),
        column(
            "skipped",
            pa.string(),
            "reason why the file has no units: language, too_large, empty, vendored, generated, binary, encoding, unreadable, "
            "duplicate; null if it is used",
            null=True,
        ),
        column("detail", pa.string(), "explanation of the reason, a sentence; empty for a file that is used"),
    ),
)

UNITS = TableSchema(
    name="units",
    doc="One row per function, method, class, group of statements, section of a text or window of lines: what a search finds.",
    key=("unit_id",),
    columns=(
        column("unit_id", pa.string(), "sha256 of path, qualified name, first and last line and text_id, hex"),
        column("path", pa.string(), "the file, a value of path in the table sources"),
        column("source_id", pa.string(), "sha256 of the file's bytes, hex"),
        column("language", pa.string(), "programming language of the file"),
        column("package", pa.string(), "the root and the file's top-level module, joined by a slash"),
        column("module", pa.string(), "dotted name of the file's module"),
        column("name", pa.string(), "name of the function or class; empty for a window of lines"),
        column(
            "qualified_name", pa.string(), "name with the names of the classes and functions around it, joined by dots", long=True
        ),
        column("kind", pa.string(), "function, method, class, code (statements outside), section, cell, or lines (a window)"),
        column("first_line", pa.int32(), "first line of the unit in its file, decorators included, from 1"),
        column("last_line", pa.int32(), "last line of the unit in its file"),
        column("code_lines", pa.int32(), "lines of the body that hold code: without signature, docstring, comments, empty lines"),
        column(
            "signature", pa.string(), "the lines from the first word to the colon that opens the body, on one line", long=True
        ),
        column("docstring", pa.string(), "the docstring, cleaned of its indentation; empty if there is none", long=True),
        column(
            "body",
            pa.string(),
            "the body without the docstring, indentation removed; of a class the signatures of its methods",
            long=True,
        ),
        column(
            "query", pa.string(), "first sentence of the docstring, on one line; null without a docstring", null=True, long=True
        ),
        column(
            "text",
            pa.string(),
            "the document: module, qualified name, signature and body; comments are kept, docstring and decorators are not",
            long=True,
        ),
        column("text_id", pa.string(), "sha256 of the word document, a line feed and the text, hex; a key of the table tokens"),
        column(
            "words",
            pa.string(),
            "words for lexical search: identifiers split and lower-cased, with name and path, spaced",
            long=True,
        ),
        column(
            "docstring_words", pa.string(), "words of the docstring, split likewise; an evaluation leaves them out", long=True
        ),
        column(
            "title",
            pa.string(),
            "a second text: first sentence of the docstring, or the words of the name; may be empty",
            long=True,
        ),
        column("title_id", pa.string(), "as text_id, of the title; empty if there is none"),
    ),
)

PAIRS = TableSchema(
    name="pairs",
    doc="One row per unit with a docstring: the query, the document that answers it, and its split, or why it is not used.",
    key=("pair_id",),
    columns=(
        column("pair_id", pa.string(), "sha256 of unit_id and query, hex"),
        column("unit_id", pa.string(), "the unit that answers the query, a key of the table units"),
        column("package", pa.string(), "the root and the file's top-level module"),
        column("query", pa.string(), "the query: first sentence of the docstring"),
        column("query_id", pa.string(), "sha256 of the word query, a line feed and the query, hex; a key of the table tokens"),
        column("text_id", pa.string(), "the document of the unit, a key of the table tokens"),
        column("split", pa.string(), "train, valid or test"),
        column(
            "duplicate_group",
            pa.string(),
            "pair_id of the first pair (by path and line) with the same query or body; they are never each other's negatives",
        ),
        column("overlap", pa.float32(), "share of the distinct words of the query that occur in the document, 0 to 1"),
        column(
            "leak",
            pa.float32(),
            "for a train pair, the largest Jaccard similarity of token trigrams with a document of valid or test, 0 to 1; else 0",
        ),
        column(
            "rejected",
            pa.string(),
            "reason why the pair is not used: short_query, long_query, short_body, boilerplate, no_overlap, verbatim, duplicate, "
            "leak; null if it is used",
            null=True,
        ),
        column("detail", pa.string(), "explanation of the reason, a sentence; empty for a pair that is used"),
    ),
)

TOKENS = TableSchema(
    name="tokens",
    doc="One row per distinct text and role, with its token ids; text beyond the role's length is cut off.",
    key=("text_id",),
    tensors=(tensor("ids", "int32", "token ids, the end token included, no padding"),),
    columns=(
        column("text_id", pa.string(), "sha256 of role, a line feed and the text, hex: text_id of units, or query_id of pairs"),
        column("role", pa.string(), "query or document"),
        column("count", pa.int32(), "number of token ids, the end token included"),
        column("truncated", pa.int32(), "number of tokens that were cut off because the text is longer than its role's length"),
        column("unknown", pa.int32(), "number of token ids that stand for text outside the vocabulary"),
        column("ids_shape", pa.list_(pa.int32()), "shape of ids: number of tokens"),
    ),
)

NEGATIVES = TableSchema(
    name="negatives",
    doc="One row per training pair and hard negative: a document that search ranks high and that does not answer the query.",
    key=("pair_id", "position"),
    columns=(
        column("pair_id", pa.string(), "the training pair, a key of the table pairs"),
        column("position", pa.int32(), "place among the negatives of the pair, from 0; the hardest first"),
        column("unit_id", pa.string(), "the negative, a key of the table units"),
        column("text_id", pa.string(), "the document of the negative, a key of the table tokens"),
        column("score", pa.float32(), "score of the negative for the query: BM25, or MaxSim of an encoder"),
        column("positive_score", pa.float32(), "score of the pair's own document for the query; 0 if search does not find it"),
        column("source", pa.string(), "the search that found the negative: lexical, or the setting negatives.encoder"),
    ),
)

TRAIN = TableSchema(
    name="train",
    doc="One row per training step and pair: its loss and its rank among the documents of the batch.",
    key=("step", "split", "sample"),
    columns=(
        column("step", pa.int32(), "optimizer step, from 1"),
        column(
            "split",
            pa.string(),
            "train: before the step; validation: a held-out pair, ranked with the adapter after the step",
            default="train",
        ),
        column("sample", pa.int32(), "position of the pair in the step, from 0"),
        column("epoch", pa.int32(), "epoch: number of complete passes over the data before this one, from 0"),
        column("pair_id", pa.string(), "the pair, a key of the table pairs"),
        column("query_id", pa.string(), "the query, a key of the table tokens"),
        column("text_id", pa.string(), "the document, a key of the table tokens"),
        column("loss", pa.float32(), "loss of the pair; for a validation row, minus the reciprocal rank"),
        column("rank", pa.int32(), "rank of the own document among the candidates, from 1; ties count against it"),
        column("candidates", pa.int32(), "number of documents that the query was compared with"),
        column("hardest_id", pa.string(), "the best-scored other document, a key of the table tokens; null if none", null=True),
        column("score", pa.float32(), "score of the own document, mean over query tokens, -1 to 1"),
        column("hardest_score", pa.float32(), "score of the hardest other document; null if none", null=True),
        column("lr", pa.float64(), "learning rate of the step"),
        column("grad_norm", pa.float32(), "global norm of the step's gradient before clipping"),
        *STEP_COSTS,
    ),
)

VECTORS = TableSchema(
    name="vectors",
    doc="One row per encoder and text: the direction of a vector for every token, from the base or from a tuned encoder.",
    key=("vector_id",),
    tensors=(
        tensor(
            "vectors",
            "uint8",
            "one vector per token in 6 bits a value: 0 to 63 for -31.5 to 31.5, in a unit that makes the length 1. First the "
            "upper 4 bits, of the first half of the values in the low bits of the bytes, then the lower 2, of a quarter each",
        ),
    ),
    columns=(
        column("vector_id", pa.string(), "sha256 of encoder, a line feed and text_id, hex"),
        column("encoder", pa.string(), "base, or the sha256 of the adapter file that the encoder was tuned with"),
        column("text_id", pa.string(), "the text, a key of the table tokens"),
        column("role", pa.string(), "query or document"),
        column("count", pa.int32(), "number of tokens"),
        column("vectors_shape", pa.list_(pa.int32()), "shape of vectors: tokens, 3/4 of the width of a vector"),
    ),
)

INDEX = TableSchema(
    name="index",
    doc="One row per unit that a search can find; the artifacts hold one vector of each unit and a full-text index.",
    key=("unit_id",),
    columns=(
        column("unit_id", pa.string(), "the unit, a key of the table units"),
        column("encoder", pa.string(), "the encoder of the vectors: base, or the sha256 of the adapter file"),
        column("vector_id", pa.string(), "the vectors of the unit's text, a key of the table vectors"),
        column("path", pa.string(), "the file, a value of path in the table sources"),
        column(
            "qualified_name", pa.string(), "name with the names of the classes and functions around it, joined by dots", long=True
        ),
        column("first_line", pa.int32(), "first line of the unit in its file, from 1"),
        column("last_line", pa.int32(), "last line of the unit in its file"),
        column(
            "signature", pa.string(), "the lines from the first word to the colon that opens the body, on one line", long=True
        ),
        column("file", pa.string(), "where the file lies: relative to the project's folder, or absolute"),
        column("text_id", pa.string(), "the document of the unit, a key of the table tokens"),
        column("title_vector", pa.string(), "the vectors of the unit's title, a key of the table vectors; empty if it has none"),
        column("words_id", pa.string(), "first 16 hex digits of the sha256 of the docstring's words; the others are in text_id"),
        column("count", pa.int32(), "number of vectors, one per token"),
    ),
)

RANKS = TableSchema(
    name="ranks",
    doc="One row per held-out query, encoder and mode: the rank of its own unit in semantic, lexical and hybrid search.",
    key=("pair_id", "encoder", "mode"),
    columns=(
        column("pair_id", pa.string(), "the pair, a key of the table pairs"),
        column("encoder", pa.string(), "base, or the sha256 of the adapter file"),
        column("mode", pa.string(), "plain, or hard: the unit's own name is removed from its words and its text"),
        column("split", pa.string(), "valid or test"),
        column("query", pa.string(), "the query"),
        column("unit_id", pa.string(), "the unit that answers the query, a key of the table units"),
        column("overlap", pa.float32(), "share of the distinct words of the query that occur in the document, 0 to 1"),
        column("candidates", pa.int32(), "number of units that were ranked"),
        column(
            "semantic",
            pa.int32(),
            "rank of the unit in semantic search, from 1; ties count against it; null in the hard mode if the documents without "
            "names have no vectors",
            null=True,
        ),
        column("lexical", pa.int32(), "rank of the unit in lexical search, from 1; ties count against it"),
        column("hybrid", pa.int32(), "rank of the unit in hybrid search, from 1; null where semantic is null", null=True),
        column(
            "weight",
            pa.float32(),
            "weight of the semantic scores in hybrid search, 0 to 1, chosen on the valid queries; null where semantic is null",
            null=True,
        ),
        column("top_id", pa.string(), "the unit that semantic search ranks first, or lexical search where semantic is null"),
    ),
)
