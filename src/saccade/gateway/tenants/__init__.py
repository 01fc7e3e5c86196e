"""The tenants that send requests: their keys file, their limits per minute, and their usage.

Other packages mainly use `ApiKeyStore`, `Account`, `Tenant`, and the reports on each tenant's usage.
"""
