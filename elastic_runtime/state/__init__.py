"""The training's state: what belongs to it, how it is packed, sent to joiners and written as checkpoints."""
