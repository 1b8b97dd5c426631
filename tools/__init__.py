"""What developers run and users do not: nothing in here is part of the package."""
