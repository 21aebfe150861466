"""Names that other programs give to settings, so that an unknown key can be answered with the name that it has here."""

SYNONYMS = {
    "steps": (
        "epochs",
        "epoch",
        "num_epochs",
        "max_train_steps",
        "num_train_steps",
        "iterations",
        "iters",
        "num_inference_steps",
    ),
    "batch_size": ("batch", "batchsize", "train_batch_size", "bs"),
    "accumulate": ("gradient_accumulation", "gradient_accumulation_steps", "grad_accum", "accumulation_steps"),
    "lr": ("learning_rate", "learningrate", "unet_lr"),
    "rank": ("network_dim", "dim", "lora_rank", "r", "network_rank"),
    "alpha": ("network_alpha", "lora_alpha"),
    "variant": ("network_type", "adapter_type", "network_module"),
    "resolutions": ("resolution", "size", "image_size"),
    "checkpoint_every": ("save_every", "save_every_n_steps", "checkpointing_steps", "save_steps"),
    "shape": ("lr_scheduler", "scheduler", "lr_scheduler_type"),
    "warmup_steps": ("warmup", "lr_warmup_steps", "num_warmup_steps"),
    "clip": ("max_grad_norm", "grad_clip", "gradient_clipping"),
    "kind": ("optimizer_type", "optim"),
    "precision": ("dtype", "mixed_precision"),
    "trigger": ("trigger_word", "instance_token", "token"),
    "preview_prompts": ("prompts", "sample_prompts", "validation_prompt", "validation_prompts"),
    "folder": ("path", "folder_path", "data_dir", "instance_data_dir", "dataset"),
    "family": ("model", "base_model", "name_or_path", "pretrained_model_name_or_path"),
    "guidance": ("cfg", "guidance_scale", "cfg_scale"),
    "caption_dropout": ("caption_dropout_rate", "caption_dropout_prob"),
}


def name_here(word: str) -> str:
    """The setting's name here, "lr" for "learning_rate", or ""."""
    plain = word.lower().replace("-", "_")
    return next((name for name, words in SYNONYMS.items() if plain in words), "")
