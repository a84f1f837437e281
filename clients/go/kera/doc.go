// Package kera writes records to streams of KerA and reads them, over gRPC.
//
// It is a small client made after docs/writing-a-client.md, for streams with the default schema (time, keys, value,
// headers). A [Producer] stores each record once, in the order of its key, through moves of streamlets and crashes of
// brokers. A [Consumer] follows all of a stream, and goes on from [Positions] that were saved in a file.
//
// Chunks are written in version 2, and read in versions 1 and 2. What the package does not do is in its README.
package kera
