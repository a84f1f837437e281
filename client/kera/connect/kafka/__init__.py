"""Topics of Kafka as the source and as the target of a copy, through confluent-kafka (the extra ``kafka``)."""
