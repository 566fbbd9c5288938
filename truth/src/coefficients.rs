//! What a network and a machine do that no cell says: one file, `--truth FILE`.

use crate::job::Software;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

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

impl Default for Tcp {
    /// Linux: ten segments of 1448 bytes, retransmission timeouts of 200 ms at least. 66 bytes of heads (Ethernet, IP, TCP with
    /// timestamps) with each segment, and an acknowledgement of as many bytes for every second one.
    fn default() -> Self {
        Self {
            segment_bytes: 1448.0,
            overhead_bytes: 99.0,
            initial_segments: 10.0,
            window_bytes: 6e6,
            timeout_s: 0.2,
            tail_loss_share: 0.3,
            stack_s: 30e-6,
        }
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
    #[error("use {path}: {what} is {value}, allowed is {allowed}")]
    Range {
        /// Which file.
        path: String,
        /// Which number.
        what: String,
        /// As given.
        value: f64,
        /// The allowed range.
        allowed: &'static str,
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
        let positive = [
            ("tcp.segment_bytes", self.tcp.segment_bytes),
            ("tcp.initial_segments", self.tcp.initial_segments),
            ("tcp.window_bytes", self.tcp.window_bytes),
            ("tcp.timeout_s", self.tcp.timeout_s),
            ("buffer_bytes", self.buffer_bytes),
        ];
        let fine = |value: f64| value.is_finite() && value > 0.0;
        let range = |what: &str, value, allowed| {
            Err(ReadError::Range { path: path.to_owned(), what: what.to_owned(), value, allowed })
        };
        if let Some((what, value)) = positive.into_iter().find(|(_, value)| !fine(*value)) {
            return range(what, value, "above 0");
        }
        if !(0.0..=1.0).contains(&self.tcp.tail_loss_share) {
            return range("tcp.tail_loss_share", self.tcp.tail_loss_share, "0 to 1");
        }
        if !(self.tcp.overhead_bytes.is_finite() && self.tcp.overhead_bytes >= 0.0) {
            return range("tcp.overhead_bytes", self.tcp.overhead_bytes, "0 or above");
        }
        let software = [self.software.collective_s, self.software.round_s, self.software.byte_s, self.tcp.stack_s];
        let of = |c: &CodecSeconds| [c.compress_value_s, c.compress_kept_s, c.decompress_value_s, c.decompress_kept_s];
        let codecs = self.codec.iter().flat_map(|(name, codec)| of(codec).map(|value| (name.clone(), value)));
        let all = software.into_iter().map(|value| ("software, tcp.stack_s".to_owned(), value)).chain(codecs);
        match all.into_iter().find(|(_, value)| !(value.is_finite() && *value >= 0.0)) {
            Some((what, value)) => range(&what, value, "0 or above"),
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
        assert!(error("buffer_bytes = ", "buffer_bytes = -").contains("buffer_bytes is -"));
        assert!(error("buffer_bytes", "bufer_bytes").contains("bufer_bytes"));
        assert!(error("tail_loss_share = 0", "tail_loss_share = 7").contains("tail_loss_share is 7"));
    }
}
