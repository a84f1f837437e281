/**
 * Communicates with brokers: reads the chunks of a piece, and stores rows as chunks, each row once.
 * Readers use {@code PieceReader}; writers use {@code ChunkSender}, with an {@code Outlet} for each streamlet.
 * These three hide connections, frames, pushed memory, TLS and messages.
 * No class here depends on Spark. Spark's distribution has the libraries that they use: Jackson, slf4j, lz4, zstd,
 * and Arrow, from which {@code Chunk} uses {@code MemoryUtil} to get the address of its payload.
 */
package kera.wire;
