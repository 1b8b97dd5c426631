"""The membership service over HTTP: workers' messages, the rendezvous store, and reports of trainings."""
