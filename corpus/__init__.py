"""The indexed corpus snapshot, as it is handed to the stages."""
