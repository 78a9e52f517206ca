"""Copies of a run in object storage (`[storage]`): S3, Google Cloud Storage, Azure, or a folder.

::

    trainer ─► CheckpointStore.save ─► SnapshotUploader.request ─► thread ─► objects, then the snapshot, then clean-up
    penstock run, penstock train: folder lost ─► newest snapshot ─► objects ─► folder

A snapshot lists every file as of one checkpoint. It is written after all of its objects, which are never changed, so
what is in storage can be restored at every moment. `bucket` talks to storage, `snapshot` is the list, `uploader` writes
it, `download` reads it.
"""
