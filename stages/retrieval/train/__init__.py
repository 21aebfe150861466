"""The stage `train`: an adapter and the projection head of a retriever, trained on pairs of query and document."""

from stages.retrieval.train.stage import STAGE as STAGE
