"""Who sends requests: tenants, the file of their keys, what they may use in a minute and what they have used.

Other rooms use `ApiKeyStore` (the constructor), `Account`, `Tenant`, and the report of what each tenant has used.
"""
