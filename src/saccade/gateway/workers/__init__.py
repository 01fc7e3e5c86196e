"""The workers, and which of them serves a request.

Other packages use `Routing` (which constructs the rest), `WorkerPool`, `Dispatcher` with its `Prompt` and `Preview`,
`Attempt`, the reports of workers and routes, and `check_url`.
"""
