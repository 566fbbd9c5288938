//! Writing messages.

use super::{HEADER_BYTES, MAGIC, VERSION, at, checksum::crc32c, dtype, encoding, method_code};
use crate::Compressor;
use crate::Selection;
use flexcomm_domain::spec::Checksum;

/// What of a selection travels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Part {
    /// Indices and values: allgather.
    Whole,
    /// Indices alone: AR-Topk's broadcast.
    Indices,
}

/// Replaces `out` by the message.
pub fn encode(compressor: Compressor, selection: &Selection, part: Part, checksum: Checksum, out: &mut Vec<u8>) {
    let dtype = if part == Part::Whole { dtype::F32 } else { dtype::NONE };
    let codes = [method_code(compressor), dtype, encoding::U32];
    begin(codes, selection.n(), selection.len(), out);
    out.reserve(super::message_bytes(selection.len(), part) - HEADER_BYTES);
    out.extend(selection.indices().iter().flat_map(|i| i.to_le_bytes()));
    if part == Part::Whole {
        out.extend(selection.values().iter().flat_map(|v| v.to_le_bytes()));
    }
    finish(checksum, out);
}

/// Replaces `out` by a message with every value. Values that are not finite are refused by the reader.
pub fn encode_dense(values: &[f32], checksum: Checksum, out: &mut Vec<u8>) {
    let codes = [method_code(Compressor::None), dtype::F32, encoding::DENSE];
    begin(codes, values.len(), values.len(), out);
    out.extend(values.iter().flat_map(|v| v.to_le_bytes()));
    finish(checksum, out);
}

fn begin([method, dtype, encoding]: [u8; 3], n: usize, k: usize, out: &mut Vec<u8>) {
    out.clear();
    let mut header = [0; HEADER_BYTES];
    header[..4].copy_from_slice(&MAGIC);
    header[at::VERSION] = VERSION;
    header[at::METHOD] = method;
    header[at::DTYPE] = dtype;
    header[at::ENCODING] = encoding;
    header[at::N..at::K].copy_from_slice(&(n as u64).to_le_bytes());
    header[at::K..at::CHECKSUM_KIND].copy_from_slice(&(k as u64).to_le_bytes());
    out.extend_from_slice(&header);
}

fn finish(checksum: Checksum, out: &mut [u8]) {
    if checksum == Checksum::Crc32c {
        out[at::CHECKSUM_KIND] = 1;
        let sum = crc32c(&[&out[..at::CHECKSUM], &out[HEADER_BYTES..]]);
        out[at::CHECKSUM..HEADER_BYTES].copy_from_slice(&sum.to_le_bytes());
    }
}
