"""What each page shows: functions from a cluster's state to the HTML of a page's elements."""
