"""The native wire's schema, and the code that protoc makes of it (`scripts/generate-proto`)."""
