"""Whether a host can do what an agent would ask of it: `hawker doctor`.

`facts` reads what is there, `findings` judges it, and the drivers' own fingerprints say what they can run.
"""
