"""Experiment trackers: copies of the numbers of a training run in TensorBoard, trackio, Weights & Biases or MLflow.

The table `train` is the truth. A tracker gets the steps that the table has and the tracker lacks, so a run that was
killed is completed and no step is written twice. The packages are extras, imported only when a run is tracked.
"""
