//! From the arrival of bytes to the rate of the link.
//!
//! 1. The first part of the bytes is left out. The rest is cut into blocks of equal size; the longest tail of
//!    blocks with like rates is the steady part, and its bytes over its time the answer.
//! 2. On a long link a small budget ends before TCP has filled it: bytes come in bursts, one per round trip. Each
//!    burst was still spread out by the bottleneck, so the rate inside the later part of the larger bursts is the
//!    answer (less sure: a shaper's token bucket hides in a burst).
//! 3. A test that shares the link with a job, or whose windows do not fill a long link, gets all of it only now and
//!    then: when the fastest tenth of a second after the first part was faster than the answer so far, it is the
//!    answer (less sure, too). Nothing passes a bottleneck faster than its rate.

use crate::Nanos;
use crate::stats::median;
use serde::{Deserialize, Serialize};

/// Most points kept; beyond it every second one goes.
const MAX_POINTS: usize = 32_768;
/// Share of the bytes that is never counted: slow start and the bucket of a shaper.
const FIRST_PART: f64 = 0.2;
/// Fewest bytes between points that speak for the link, as a share of all: the last packets may have come together.
const LEAST_SHARE: f64 = 0.5;
/// Blocks into which the rest is cut.
const BLOCKS: usize = 16;
/// Fewest bytes in a block: two segments of a jumbo frame, so that one packet is no block.
const MIN_BLOCK: f64 = 4096.0;
/// Rates in the steady part are this close to its median, as a share, for most of its blocks.
const LIKE: f64 = 0.25;
/// Fewest blocks in the steady part, and fewest points in time that they lie between.
const MIN_STEADY: usize = 6;
/// A steady part over this many round trips needs no second look.
pub(super) const TRUSTED_RTTS: f64 = 4.0;
/// Share of a burst that is left out at its begin.
const BURST_HEAD: f64 = 0.35;
/// Fewest bytes a burst must have.
const MIN_BURST: f64 = 16_384.0;
/// Fewest seconds inside bursts that say something: less is the clock's grain.
const MIN_BURST_S: f64 = 0.001;
/// Fewest bytes inside bursts, as a share of all: less is a leftover.
const MIN_BURST_SHARE: f64 = 0.2;
/// Shortest time over which the fastest part is sought, seconds: below a job's pause, and far above the grain of the
/// scheduler and what a shaper lets pass at once after a gap (htb: 10 ms of its rate where HZ is 100).
const PEAK_S: f64 = 0.1;
/// And its fewest bytes: sixteen of the largest packets that a host hands over at once.
const PEAK_BYTES: u64 = 1_000_000;
/// The fastest part is this much faster than a rate that is not steady before it counts: what measuring errs by.
const PEAK_ABOVE: f64 = 0.05;
/// Gaps shorter than this never end a burst: the scheduler makes them.
const MIN_GAP_S: f64 = 0.004;

/// Arrivals: total bytes received at points in time.
#[derive(Debug, Clone)]
pub struct Curve {
    begun: Nanos,
    points: Vec<(Nanos, u64)>,
    total: u64,
}

/// An estimated rate.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Rate {
    /// Payload bit/s.
    pub bps: f64,
    /// Whether it was found in a steady part; otherwise inside bursts, or over all there was.
    pub steady: bool,
    /// Bytes over which it was taken.
    pub used_bytes: f64,
    /// Seconds over which it was taken.
    pub used_s: f64,
}

impl Curve {
    /// Nothing was sent before `begun`.
    pub fn new(begun: Nanos) -> Self {
        Self { begun, points: Vec::new(), total: 0 }
    }

    /// `bytes` more arrived at `at`. A stamp before the last one (streams are read in turn) counts as the last.
    pub fn add(&mut self, at: Nanos, bytes: u64) {
        self.total = self.total.saturating_add(bytes);
        match self.points.last_mut() {
            Some(last) if at <= last.0 => last.1 = self.total,
            _ => self.points.push((at, self.total)),
        }
        if self.points.len() > MAX_POINTS {
            let mut keep = false;
            self.points.retain(|_| {
                keep = !keep;
                keep
            });
        }
    }

    /// Bytes that arrived.
    pub fn total(&self) -> u64 {
        self.total
    }

    /// The best estimate so far; `rtt_s` is the round trip without queueing (0 when unknown). `None` before the first
    /// bytes.
    pub fn rate(&self, rtt_s: f64) -> Option<Rate> {
        let found = self.of_all(rtt_s)?;
        // What was steady is believed up to half of what steadiness allows.
        let above = if found.steady { LIKE / 2.0 } else { PEAK_ABOVE };
        Some(self.fastest().filter(|fastest| fastest.bps > found.bps * (1.0 + above)).unwrap_or(found))
    }

    /// The same, for a link that the test had to itself.
    fn of_all(&self, rtt_s: f64) -> Option<Rate> {
        let steady = self.steady();
        if let Some(steady) = steady.filter(|s| s.used_s >= TRUSTED_RTTS * rtt_s) {
            return Some(steady);
        }
        // Over a few round trips bursts can look like a steady flow: their inside decides.
        let plain = steady.or_else(|| self.later_part(rtt_s))?;
        let bursts = if rtt_s >= MIN_GAP_S { self.inside_bursts(rtt_s) } else { None };
        Some(bursts.filter(|burst| burst.bps > plain.bps * (1.0 + LIKE / 2.0)).unwrap_or(plain))
    }

    /// The fastest part after the first part that is long enough.
    fn fastest(&self) -> Option<Rate> {
        let later = self.after_first_part()?;
        let mut end = 0;
        let parts = later.iter().map_while(|begin| {
            let long = |(at, total): &(Nanos, u64)| at.since(begin.0) >= PEAK_S && total - begin.1 >= PEAK_BYTES;
            end += later[end..].iter().position(long)?;
            span(begin, &later[end])
        });
        parts.max_by(|a, b| a.bps.total_cmp(&b.bps))
    }

    /// Where the first part of the bytes ends.
    fn first_part(&self) -> Option<f64> {
        let (first, last) = (self.points.first()?.1 as f64, self.total as f64);
        Some(first + FIRST_PART * (last - first))
    }

    /// The points after it.
    fn after_first_part(&self) -> Option<&[(Nanos, u64)]> {
        let start = self.first_part()?;
        Some(&self.points[self.points.partition_point(|(_, total)| (*total as f64) < start)..])
    }

    /// The same, where they are enough to speak for the link.
    fn later_points(&self) -> Option<&[(Nanos, u64)]> {
        let later = self.after_first_part()?;
        let bytes = later.last()?.1 - later.first()?.1;
        (later.len() >= MIN_STEADY && bytes as f64 >= LEAST_SHARE * self.total as f64).then_some(later)
    }

    /// Everything but the first part. When that is too little: all bytes over the time since the first of them could
    /// arrive, a round trip after the receiver was ready; the link may have passed them faster.
    fn later_part(&self, rtt_s: f64) -> Option<Rate> {
        let later = self.later_points().and_then(|later| span(later.first()?, later.last()?));
        later.or_else(|| {
            let earliest = self.begun.plus(rtt_s);
            let begun = if earliest < self.points.first()?.0 { earliest } else { self.begun };
            span(&(begun, 0), self.points.last()?)
        })
    }

    /// When `bytes` in total had arrived, by linear interpolation, in seconds since the first point.
    fn time_of(&self, bytes: f64) -> f64 {
        let origin = self.points[0].0;
        let after = self.points.partition_point(|(_, total)| (*total as f64) < bytes);
        if after == 0 {
            return 0.0;
        }
        let Some(b) = self.points.get(after) else { return self.points[after - 1].0.since(origin) };
        let a = self.points[after - 1];
        let share = (bytes - a.1 as f64) / (b.1 - a.1).max(1) as f64;
        a.0.since(origin) + share * b.0.since(a.0)
    }

    fn steady(&self) -> Option<Rate> {
        let (start, total) = (self.first_part()?, self.total as f64);
        let blocks = (((total - start) / MIN_BLOCK) as usize).min(BLOCKS);
        if blocks < MIN_STEADY {
            return None;
        }
        let size = (total - start) / blocks as f64;
        let edges: Vec<f64> = (0..=blocks).map(|i| start + size * i as f64).collect();
        let times: Vec<f64> = edges.iter().map(|edge| self.time_of(*edge)).collect();
        // Between two points times are interpolated, and look steady whatever was so.
        let measured = |skip: usize| {
            let mut between: Vec<usize> =
                edges[skip..].iter().map(|edge| self.points.partition_point(|p| (p.1 as f64) < *edge)).collect();
            between.dedup();
            between.len() >= MIN_STEADY
        };
        let spans: Vec<f64> = times.windows(2).map(|pair| pair[1] - pair[0]).collect();
        let steady = |skip: &usize| alike(&spans[*skip..]) && measured(*skip);
        (0..=blocks - MIN_STEADY.max(blocks / 2)).find(steady).and_then(|skip| {
            let (bytes, seconds) = (size * (blocks - skip) as f64, times[blocks] - times[skip]);
            (seconds > 0.0).then(|| Rate {
                bps: bytes * 8.0 / seconds,
                steady: true,
                used_bytes: bytes,
                used_s: seconds,
            })
        })
    }

    fn inside_bursts(&self, rtt_s: f64) -> Option<Rate> {
        let gap = (rtt_s / 3.0).max(MIN_GAP_S);
        let mut bursts: Vec<&[(Nanos, u64)]> =
            self.points.chunk_by(|a, b| b.0.since(a.0) <= gap).filter(|burst| burst.len() > 3).collect();
        let size = |burst: &[(Nanos, u64)]| (burst[burst.len() - 1].1 - burst[0].1) as f64;
        let largest = bursts.iter().map(|burst| size(burst)).fold(0.0, f64::max);
        bursts.retain(|burst| size(burst) >= (largest / 2.0).max(MIN_BURST));
        let (mut bytes, mut seconds) = (0.0, 0.0);
        for burst in bursts {
            let head = burst[0].1 as f64 + BURST_HEAD * size(burst);
            let from = burst.partition_point(|(_, total)| (*total as f64) < head).min(burst.len() - 2);
            let tail = span(&burst[from], &burst[burst.len() - 1])?;
            bytes += tail.used_bytes;
            seconds += tail.used_s;
        }
        let enough = seconds >= MIN_BURST_S && bytes >= MIN_BURST_SHARE * self.total as f64;
        enough.then(|| Rate { bps: bytes * 8.0 / seconds, steady: false, used_bytes: bytes, used_s: seconds })
    }
}

fn span(first: &(Nanos, u64), last: &(Nanos, u64)) -> Option<Rate> {
    let (used_bytes, used_s) = ((last.1 - first.1) as f64, last.0.since(first.0));
    (used_s > 0.0).then(|| Rate { bps: used_bytes * 8.0 / used_s, steady: false, used_bytes, used_s })
}

/// Three quarters of the spans lie close to their median and the two halves take the same time: a ramp does not
/// pass, a single stall of the scheduler with its catching up does.
fn alike(spans: &[f64]) -> bool {
    let Some(middle) = median(spans).filter(|middle| *middle > 0.0) else { return false };
    let close = spans.iter().filter(|span| (*span / middle - 1.0).abs() <= LIKE).count();
    let (a, b) = spans.split_at(spans.len() / 2);
    let mean = |part: &[f64]| part.iter().sum::<f64>() / part.len() as f64;
    close * 4 >= spans.len() * 3 && (mean(a) / mean(b) - 1.0).abs() <= LIKE / 2.0
}
