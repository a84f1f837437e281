/**
 * Talks with brokers: gets the chunks of a piece, and stores rows as chunks, each once.
 * Readers use {@code PieceReader}; writers use {@code ChunkSender}, with an {@code Outlet} for each streamlet.
 * Connections, frames, pushed memory, TLS and messages stay behind these three.
 * No class here knows Spark. Its distribution brings the libraries that they use: Jackson, slf4j, lz4, zstd,
 * and Arrow, of which {@code Chunk} takes {@code MemoryUtil} for the address of its payload.
 */
package kera.wire;
