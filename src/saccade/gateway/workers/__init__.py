"""The workers, and which of them serves a request.

Other rooms use `Routing` (the constructor of all this), `WorkerPool`, `Dispatcher` with its `Prompt` and `Preview`,
`Attempt`, the reports of workers and routes, and `check_url`.
"""
