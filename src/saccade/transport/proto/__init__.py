"""The native wire's schema, and the code that protoc generates from it (`scripts/generate-proto`)."""
