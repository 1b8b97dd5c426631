"""A cluster that several users of a machine share: a service of root, whose jobs run as their owners.

Invariants: who asks is what the kernel says of the other end of the socket (SO_PEERCRED), never what a client sends;
root opens, enters and executes nothing that a user names; and nothing that root writes is in a directory of a user.
"""
