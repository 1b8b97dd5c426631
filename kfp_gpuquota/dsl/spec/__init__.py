"""What a step asks for and what its pods are: shared by the compiled pipeline and the launcher. Pure, without kfp."""
