"""The report of the LocAt studies: S2's claims, what each part changes, and CutMix beside it."""
