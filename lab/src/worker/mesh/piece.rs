//! Passive samples of links: what the arrival of a frame tells about the link that it came over.
//!
//! Bytes that arrive as an even stream arrive at the bandwidth of the slowest link on their way, however late their
//! sender was and however long the way is (dispersion of a packet train).

use std::time::{Duration, Instant};

/// Pieces below this many bytes are a handful of packets: one that is late spoils them.
const LEAST_BYTES: u64 = 8 * 1024;

/// The longest pause, as a share of the whole time. A longer one says that the sender waited, for its processor or
/// for acknowledgements that let it go on, and not for this link.
const LONGEST_PAUSE: f64 = 0.25;

/// A piece of a stream.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Piece {
    /// Bytes that arrived after the first ones.
    pub bytes: u64,
    /// Seconds that they took: no latency is in it.
    pub seconds: f64,
}

/// Watches a frame arrive. It counts from the moment when all that had come was read: what waited in the socket until
/// a late reader came says nothing about the link.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct PieceWatch {
    begun: bool,
    /// When counting began; when bytes were read last.
    span: Option<(Instant, Instant)>,
    bytes: u64,
    longest_pause: Duration,
}

impl PieceWatch {
    /// `n` bytes were read.
    pub(super) fn read(&mut self, n: usize, now: Instant) {
        self.begun = true;
        if let Some((_, last)) = &mut self.span {
            self.longest_pause = self.longest_pause.max(now - *last);
            *last = now;
            self.bytes += n as u64;
        }
    }

    /// There is nothing more to read for now.
    pub(super) fn drained(&mut self, now: Instant) {
        if self.begun && self.span.is_none() {
            self.span = Some((now, now));
        }
    }

    /// What arrived, if it was enough and even.
    pub(super) fn piece(&self) -> Option<Piece> {
        let (begun, last) = self.span?;
        let seconds = (last - begun).as_secs_f64();
        let even = self.longest_pause.as_secs_f64() <= LONGEST_PAUSE * seconds;
        (self.bytes >= LEAST_BYTES && seconds > 0.0 && even).then_some(Piece { bytes: self.bytes, seconds })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reads of `n` bytes at the given milliseconds, the socket empty after each.
    fn watched(reads: &[(u64, usize)]) -> Option<Piece> {
        let start = Instant::now();
        let mut watch = PieceWatch::default();
        for (at_ms, n) in reads {
            let now = start + Duration::from_millis(*at_ms);
            watch.read(*n, now);
            watch.drained(now);
        }
        watch.piece()
    }

    #[test]
    fn an_even_stream_shows_the_bandwidth_without_what_had_waited() {
        let reads: Vec<(u64, usize)> =
            std::iter::once((70, 40_000)).chain((1..=20).map(|i| (70 + 3 * i, 1500))).collect();
        let piece = watched(&reads).unwrap();
        assert_eq!(piece.bytes, 30_000);
        assert!((piece.seconds - 0.06).abs() < 1e-9, "{piece:?}");
    }

    #[test]
    fn bursts_and_scraps_say_nothing() {
        let bursts: Vec<(u64, usize)> = (0..4).map(|i| (100 * i, 20_000)).collect();
        assert_eq!(watched(&bursts), None, "a window's worth every round trip");
        assert_eq!(watched(&[(0, 1500), (1, 1500), (2, 1500), (3, 1500), (4, 1500)]), None, "too little");
        assert_eq!(watched(&[(0, 100_000)]), None, "all at once");
        assert_eq!(watched(&[]), None);
    }
}
