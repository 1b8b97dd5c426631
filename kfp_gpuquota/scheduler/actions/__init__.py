"""The actions of a scheduling cycle: allocate, reclaim, preempt, consolidate, and expand over quota."""
