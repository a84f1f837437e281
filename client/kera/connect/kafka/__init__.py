"""Topics of Kafka as the source and as the target of a copy, by confluent-kafka (the extra ``kafka``)."""
