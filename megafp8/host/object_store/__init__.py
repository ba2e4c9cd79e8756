"""Object storage (S3, GCS, Azure, ...) through fsspec: paths, and a cache of objects on local disk."""

from megafp8.host.object_store.path import (
    AnyPath,
    ObjectPath,
    ObjectStoreError,
    as_path,
    is_transient,
    is_url,
    url_problem,
)

__all__ = ["AnyPath", "ObjectPath", "ObjectStoreError", "as_path", "is_transient", "is_url", "url_problem"]
