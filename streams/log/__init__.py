"""How Kafka is spoken to: clients, reading by position, transactions, blobs."""
