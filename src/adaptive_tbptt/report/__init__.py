"""The HTML report of one run or several: `atbptt report`."""
