"""From a scheduled graph to something that runs: a program over regions, each interpreted or compiled."""
