"""/v1/batches: files of requests that are answered when no other request waits."""
