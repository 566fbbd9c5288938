//! PowerSGD of a bucket's layers: two exchanges, each of nothing but f32 that add up. Round 0 is P of all layers that two
//! factors make shorter, round 1 their Q and the other layers as they are, in the layers' order, as in the messages of
//! `flexcomm_compression`.

use super::{Bucket, Gradient, split};
use crate::low_rank::{Factors, LowRank, Step, add, add_whole, begin, keep_warm, left, right, whole};
use crate::workspace::{check, check_count};
use crate::{Device, Gemm, LaunchError, Random, Span};

const ALIGN: u64 = 256;

/// A layer, and where it lies.
#[derive(Debug, Clone, Copy)]
struct Layer {
    at: u64,
    n: u64,
    /// None where it is sent as it is.
    factors: Option<(LowRank, Factors)>,
}

impl Layer {
    /// Values of a round's payload.
    fn count(&self, round: usize) -> u64 {
        match (&self.factors, round) {
            (Some((layer, _)), _) => layer.counts()[round.min(1)],
            (None, 0) => 0,
            (None, _) => self.n,
        }
    }
}

/// The sum that arrived, and what makes it a mean: 1 over the number of ranks.
#[derive(Debug, Clone, Copy)]
pub struct Product {
    /// f32.
    pub sum: Span,
    /// Times this.
    pub scale: f32,
}

/// The factors' memory of a bucket's layers, beside the [`Bucket`] of which they are: the warm starts stay from step to step.
#[derive(Debug)]
pub struct LowRanks {
    layers: Vec<Layer>,
    n: u64,
    /// All warm starts, one after the other.
    warm: Span,
}

/// Of each layer: its factors, if there are any.
fn factors_of(shapes: &[(u64, u64)], rank: u64) -> Result<Vec<Option<LowRank>>, LaunchError> {
    check_count(shapes.iter().fold(0, |sum: u64, (rows, cols)| sum.saturating_add(rows.saturating_mul(*cols))))?;
    shapes.iter().map(|(rows, cols)| LowRank::new(*rows, *cols, rank)).collect()
}

/// Warm starts, left factors, and scratch that layers share.
fn sizes(layers: &[Option<LowRank>]) -> [u64; 3] {
    let bytes = || layers.iter().flatten().map(|layer| layer.bytes().map(|bytes| bytes.next_multiple_of(ALIGN)));
    [
        bytes().map(|[warm, ..]| warm).sum(),
        bytes().map(|[_, left, _]| left).sum(),
        bytes().map(|b| b[2]).max().unwrap_or(0),
    ]
}

impl LowRanks {
    /// Bytes to borrow for layers of these (rows, columns).
    pub fn bytes(shapes: &[(u64, u64)], rank: u64) -> Result<u64, LaunchError> {
        Ok(sizes(&factors_of(shapes, rank)?).iter().sum())
    }

    /// With cold starts: clears them on the device's stream.
    pub fn new(
        device: &impl Device,
        (shapes, rank): (&[(u64, u64)], u64),
        borrowed: Span,
    ) -> Result<Self, LaunchError> {
        let known = factors_of(shapes, rank)?;
        check(("the factors' memory", borrowed, sizes(&known).iter().sum()), ALIGN)?;
        let [warm, lefts, scratch] = split(borrowed, sizes(&known));
        device.zero(warm)?;
        let (mut at, mut places) = (0, [0, 0]);
        let mut next = |((rows, cols), factors): (&(u64, u64), Option<LowRank>)| {
            let n = rows * cols;
            let factors = factors.map(|layer| {
                let [right, left, need] = layer.bytes();
                let spans = Factors {
                    warm: warm.part(places[0], right),
                    left: lefts.part(places[1], left),
                    scratch: scratch.part(0, need),
                };
                places = [places[0] + right.next_multiple_of(ALIGN), places[1] + left.next_multiple_of(ALIGN)];
                (layer, spans)
            });
            at += n;
            Layer { at: at - n, n, factors }
        };
        let layers: Vec<Layer> = shapes.iter().zip(known).map(&mut next).collect();
        Ok(Self { layers, n: at, warm })
    }

    /// Values of the payload of round 0 or 1.
    pub fn count(&self, round: usize) -> u64 {
        self.layers.iter().map(|layer| layer.count(round)).sum()
    }

    /// The warm starts of the layers that have factors, for checkpoints: zeros where none is warm yet.
    pub fn warm(&self) -> impl Iterator<Item = Span> + '_ {
        self.layers.iter().filter_map(|layer| layer.factors.map(|(_, factors)| factors.warm))
    }

    /// Of all warm starts with the gaps between them: what a step that does not count must put back.
    pub fn all_warm(&self) -> Span {
        self.warm
    }

    /// Where every layer's part of a round's payload lies.
    fn parts(&self, round: usize, payload: Span) -> impl Iterator<Item = (&Layer, Span)> + '_ {
        let mut at = 0;
        self.layers.iter().map(move |layer| {
            let bytes = 4 * layer.count(round);
            at += bytes;
            (layer, payload.part(at - bytes, bytes))
        })
    }

    fn check(&self, bucket: &Bucket, (what, payload): (&'static str, Span), round: usize) -> Result<(), LaunchError> {
        if bucket.n != self.n {
            let (value, rule) = (bucket.n as f64, "the layers' together");
            return Err(LaunchError::Parameter { what: "values of the bucket", value, rule });
        }
        check((what, payload, 4 * self.count(round)), 4)
    }

    /// Round 0: error feedback, and this rank's P to `to`. `random` is of the first layer: its step and rank do not count,
    /// and each layer's tensor is one more.
    pub fn begin(
        &self,
        device: &(impl Device + Gemm),
        bucket: &mut Bucket,
        (gradient, random): (Gradient, Random),
        to: Span,
    ) -> Result<(), LaunchError> {
        self.check(bucket, ("the left factors to send", to), 0)?;
        let feed = bucket.feed(&gradient);
        bucket.open = None;
        let step = Step { n: self.n, workspace: bucket.room.workspace };
        begin(device, &feed, step.workspace)?;
        for (number, (layer, to)) in (0..).zip(self.parts(0, to)) {
            let Some((low_rank, factors)) = &layer.factors else { continue };
            let random = Random { tensor: random.tensor.wrapping_add(number), ..random };
            let matrix = feed.compensated.part(4 * layer.at, 4 * layer.n);
            left(device, (*low_rank, random), (matrix, factors, to), &step)?;
        }
        bucket.open = Some(feed);
        Ok(())
    }

    /// Round 1: this rank's Q, and the layers without factors, to `to`. What they stand for has left the memory, unless
    /// [`Bucket::put_back`] follows.
    pub fn advance(
        &self,
        device: &(impl Device + Gemm),
        bucket: &mut Bucket,
        mean: Product,
        to: Span,
    ) -> Result<(), LaunchError> {
        self.check(bucket, ("the sum of left factors", mean.sum), 0)?;
        self.check(bucket, ("the right factors to send", to), 1)?;
        let feed = bucket.open.take().ok_or(LaunchError::Order("the second round"))?;
        let step = Step { n: self.n, workspace: bucket.room.workspace };
        for ((layer, to), (_, sum)) in self.parts(1, to).zip(self.parts(0, mean.sum)) {
            let matrix = feed.compensated.part(4 * layer.at, 4 * layer.n);
            match &layer.factors {
                Some((low_rank, factors)) => {
                    right(device, (*low_rank, sum, mean.scale), (matrix, factors, to), &step)?;
                }
                None => whole(device, (matrix, to), &step)?,
            }
        }
        bucket.memory.swap(0, 1);
        Ok(())
    }

    /// At last: `out` (f32, at any of its values) += what both sums mean. The warm starts stay: see [`Self::keep`].
    pub fn add(&self, device: &impl Device, bucket: &Bucket, mean: Product, out: Span) -> Result<(), LaunchError> {
        self.check(bucket, ("the sum of right factors", mean.sum), 1)?;
        check(("out", out, 4 * self.n), 4)?;
        for (layer, sum) in self.parts(1, mean.sum) {
            let out = out.part(4 * layer.at, 4 * layer.n);
            match &layer.factors {
                Some((low_rank, factors)) => add(device, (*low_rank, factors.left, sum), (mean.scale, out))?,
                None => add_whole(device, (sum, layer.n), (mean.scale, out))?,
            }
        }
        Ok(())
    }

    /// And the mean Q is where the next step starts, once it is sure that this one counts. It uses the workspace, but
    /// for the outcome.
    pub fn keep(&self, device: &impl Device, bucket: &Bucket, mean: Product) -> Result<(), LaunchError> {
        self.check(bucket, ("the sum of right factors", mean.sum), 1)?;
        let step = Step { n: self.n, workspace: bucket.room.workspace };
        for (layer, sum) in self.parts(1, mean.sum) {
            let Some((low_rank, factors)) = &layer.factors else { continue };
            keep_warm(device, (*low_rank, sum, mean.scale), factors.warm, &step)?;
        }
        Ok(())
    }
}
