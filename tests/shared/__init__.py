"""A cluster that several users of a machine share: real accounts, real processes of theirs."""
