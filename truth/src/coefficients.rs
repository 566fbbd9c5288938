//! What a network and a machine do that no cell says: one file, `--truth FILE`.

use crate::job::Software;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::ops::RangeInclusive;

/// How TCP behaves.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tcp {
    /// Bytes of payload in a segment.
    pub segment_bytes: f64,
    /// Bytes that a port carries beside these: heads, and what a NIC sends to acknowledge as many.
    pub overhead_bytes: f64,
    /// Segments of the first window; idleness leaves at least as many.
    pub initial_segments: f64,
    /// Bytes that a window grows to at most.
    pub window_bytes: f64,
    /// Least seconds of a retransmission timeout; a window halves for every one of idleness.
    pub timeout_s: f64,
    /// Of losses, the share that ends in a retransmission timeout.
    pub tail_loss_share: f64,
    /// Seconds that the kernels of both ends add to a round trip.
    pub stack_s: f64,
}

impl Tcp {
    /// Of the bytes that a port carries, the share that is payload.
    pub fn payload_share(&self) -> f64 {
        self.segment_bytes / (self.segment_bytes + self.overhead_bytes)
    }

    /// Bytes of the first window.
    pub fn initial_window(&self) -> f64 {
        self.initial_segments * self.segment_bytes
    }
}

/// Everything that a cell does not say.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Coefficients {
    /// How TCP behaves.
    pub tcp: Tcp,
    /// Bytes that fit into the queue of a NIC, each way.
    pub buffer_bytes: f64,
    /// How blocks are gathered.
    #[serde(default)]
    pub gather: Gather,
    /// What a collective costs a rank besides its transfers.
    pub software: Software,
    /// Seconds to compress and decompress, by compressor's name.
    pub codec: BTreeMap<String, CodecSeconds>,
}

/// An algorithm that gathers every rank's block on every rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Gather {
    /// Recursive doubling where the ranks are a power of two, else a ring.
    #[default]
    Doubling,
    /// A ring, as Gloo does it.
    Ring,
}

/// Seconds per value of the gradient, and per kept value on top, to compress and to decompress one message.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CodecSeconds {
    /// To compress.
    pub compress_value_s: f64,
    /// The same, for each kept one.
    #[serde(default)]
    pub compress_kept_s: f64,
    /// To decompress.
    pub decompress_value_s: f64,
    /// The same, for each kept one.
    #[serde(default)]
    pub decompress_kept_s: f64,
}

impl CodecSeconds {
    /// On a machine that takes so many times as long.
    pub fn scaled(&self, factor: f64) -> Self {
        Self {
            compress_value_s: factor * self.compress_value_s,
            compress_kept_s: factor * self.compress_kept_s,
            decompress_value_s: factor * self.decompress_value_s,
            decompress_kept_s: factor * self.decompress_kept_s,
        }
    }

    /// To compress so many values of which this share is kept.
    pub fn compress(&self, values: f64, kept: f64) -> f64 {
        values * (self.compress_value_s + kept * self.compress_kept_s)
    }

    /// To decompress one message of them.
    pub fn decompress(&self, values: f64, kept: f64) -> f64 {
        values * (self.decompress_value_s + kept * self.decompress_kept_s)
    }
}

/// A file of coefficients that cannot be used. Completes "failed to ...".
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// Not TOML, a key that is unknown or missing, or a value of another type.
    #[error("read {path}: {why}")]
    Form {
        /// Which.
        path: String,
        /// Line and key.
        why: String,
    },
    /// A number outside its range.
    #[error("use {path}: {key} is {value:e}, allowed is {:e} to {:e}", allowed.start(), allowed.end())]
    Range {
        /// Which file.
        path: String,
        /// Which number.
        key: String,
        /// As given.
        value: f64,
        /// The allowed range.
        allowed: RangeInclusive<f64>,
    },
}

impl Coefficients {
    /// Those that the baselines were computed with.
    pub fn frozen() -> Self {
        Self::parse("truth.toml", include_str!("truth.toml"))
            .unwrap_or_else(|error| unreachable!("a test reads it: {error}"))
    }

    /// Of a file's text; `path` is for errors.
    pub fn parse(path: &str, text: &str) -> Result<Self, ReadError> {
        let form = |why: toml::de::Error| ReadError::Form { path: path.to_owned(), why: why.to_string() };
        let all: Self = toml::from_str(text).map_err(form)?;
        all.check(path)?;
        Ok(all)
    }

    fn check(&self, path: &str) -> Result<(), ReadError> {
        let Self { tcp, buffer_bytes, software, .. } = self;
        let mut keys = vec![
            ("tcp.segment_bytes".to_owned(), tcp.segment_bytes, 100.0..=1e5),
            ("tcp.overhead_bytes".to_owned(), tcp.overhead_bytes, 0.0..=1e4),
            ("tcp.initial_segments".to_owned(), tcp.initial_segments, 1.0..=1e4),
            ("tcp.window_bytes".to_owned(), tcp.window_bytes, 1e4..=1e12),
            ("tcp.timeout_s".to_owned(), tcp.timeout_s, 1e-3..=100.0),
            ("tcp.tail_loss_share".to_owned(), tcp.tail_loss_share, 0.0..=1.0),
            ("tcp.stack_s".to_owned(), tcp.stack_s, 0.0..=1.0),
            ("buffer_bytes".to_owned(), *buffer_bytes, 1e3..=1e12),
            ("software.collective_s".to_owned(), software.collective_s, 0.0..=10.0),
            ("software.round_s".to_owned(), software.round_s, 0.0..=10.0),
            ("software.byte_s".to_owned(), software.byte_s, 0.0..=1e-3),
            ("software.at_once".to_owned(), f64::from(software.at_once), 1.0..=64.0),
            ("software.segments".to_owned(), f64::from(software.segments), 1.0..=64.0),
        ];
        for (name, codec) in &self.codec {
            let mut key = |part: &str, value| keys.push((format!("codec.\"{name}\".{part}"), value, 0.0..=1.0));
            key("compress_value_s", codec.compress_value_s);
            key("compress_kept_s", codec.compress_kept_s);
            key("decompress_value_s", codec.decompress_value_s);
            key("decompress_kept_s", codec.decompress_kept_s);
        }
        match keys.into_iter().find(|(_, value, allowed)| !allowed.contains(value)) {
            Some((key, value, allowed)) => Err(ReadError::Range { path: path.to_owned(), key, value, allowed }),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_frozen_file_is_read_and_bad_values_are_named() {
        let frozen = Coefficients::frozen();
        let text = toml::to_string(&frozen).unwrap();
        assert_eq!(Coefficients::parse("x", &text).unwrap(), frozen);
        let error =
            |from: &str, to: &str| Coefficients::parse("x", &text.replacen(from, to, 1)).unwrap_err().to_string();
        assert!(error("buffer_bytes = ", "buffer_bytes = -").contains("buffer_bytes is -1e6, allowed is 1e3 to 1e12"));
        assert!(error("buffer_bytes", "bufer_bytes").contains("bufer_bytes"));
        assert!(error("tail_loss_share = 0", "tail_loss_share = 7").contains("tcp.tail_loss_share is 7.3e0, allowed"));
        assert!(error("segments = 2\n", "segments = 1000000000\n").contains("software.segments is 1e9, allowed"));
        let fp16 = error("[codec.fp16]\ncompress_value_s = ", "[codec.fp16]\ncompress_value_s = nan # ");
        assert!(fp16.contains("codec.\"fp16\".compress_value_s is NaN, allowed is 0e0 to 1e0"), "{fp16}");
    }
}
