//! Where a bucket's gradient lies, and with it its residual and what compresses it: on the host, or on a device (`device.rs`).

use super::{Bucket, Ran, Run};
use crate::auto::Leader;
use crate::error::ExchangeError;
use flexcomm_compression::codec::ReadError;
use flexcomm_compression::pipeline::Gradient;
use std::convert::Infallible;

/// A place of gradients. The bytes of messages are the same for all places, so each rank may choose for itself, in every step; one
/// exchange stays where it began.
pub trait Place {
    /// A gradient there.
    type Gradient<'a>;
    /// Room there for as many float32 values.
    type Mean<'a>;
    /// Why a step cannot begin there. The residual is then as before, and another place can do it.
    type Failure;

    /// Compresses a gradient; or, where one rank's indices are to count, chooses them if this rank may be it.
    fn compress(
        &self,
        bucket: &mut Bucket,
        gradient: Self::Gradient<'_>,
        leader: Option<Leader>,
    ) -> Result<(), Self::Failure>;

    /// Takes this rank's values at the indices that all ranks agreed on out of the residual.
    fn take(&self, bucket: &mut Bucket) -> Result<(), ExchangeError>;

    /// `out` becomes the mean that the last round's messages mean together; refused where that is not finite. All ranks read the
    /// same bytes, so all refuse alike.
    fn mean(&self, bucket: &mut Bucket, last: &Last<'_>, out: &mut Self::Mean<'_>) -> Result<Ran, ExchangeError>;

    /// There is no mean.
    fn refuse(&self, out: Self::Mean<'_>);
}

/// What the last round of an exchange brought.
#[derive(Debug)]
pub enum Last<'a> {
    /// All ranks' messages.
    Messages(Vec<&'a [u8]>),
    /// Their sum, as a message.
    Sum(&'a [u8]),
    /// AR-Topk's sums at the agreed indices.
    Values(Vec<f32>),
}

/// Memory of this process.
#[derive(Debug, Clone, Copy)]
pub struct Host;

impl Place for Host {
    type Gradient<'a> = &'a [f32];
    type Mean<'a> = &'a mut [f32];
    type Failure = Infallible;

    fn compress(
        &self,
        bucket: &mut Bucket,
        gradient: Self::Gradient<'_>,
        leader: Option<Leader>,
    ) -> Result<(), Infallible> {
        if let Err(error) = bucket.copy_to_host() {
            bucket.fail(&error);
            return Ok(());
        }
        let (step, reference, gradient) = (bucket.step, bucket.known_rate(), Gradient::F32(gradient));
        let Run { pipeline, rates, .. } = &mut bucket.run;
        if let Some(factors) = rates.factors(reference) {
            pipeline.rescale_layers(&factors);
        }
        rates.applied(reference);
        pipeline.mark();
        let done = match leader {
            None => pipeline.compress(gradient, step, &mut bucket.message).map(|done| done.energy),
            Some(leader) => pipeline.select(gradient, step, leader.may_be(bucket.member.rank)),
        };
        match done {
            Ok(energy) => bucket.energy = energy,
            Err(error) => bucket.excuse(&error),
        }
        Ok(())
    }

    fn take(&self, bucket: &mut Bucket) -> Result<(), ExchangeError> {
        bucket.energy = bucket.run.pipeline.take(&mut bucket.values)?;
        Ok(())
    }

    fn mean(&self, bucket: &mut Bucket, last: &Last<'_>, out: &mut Self::Mean<'_>) -> Result<Ran, ExchangeError> {
        let (step, pipeline) = (bucket.step.index, &mut bucket.run.pipeline);
        let read = match last {
            Last::Messages(messages) => pipeline.aggregate(messages, step, out),
            Last::Sum(message) => pipeline.mean(message, step, out),
            Last::Values(sums) => pipeline.scatter(sums, out),
        };
        match read {
            Ok(()) => Ok(Ran::Good),
            Err(ReadError::Number { .. }) => Ok(Ran::Refused),
            Err(source) => Err(ExchangeError::Read { bucket: bucket.index, source }),
        }
    }

    fn refuse(&self, out: Self::Mean<'_>) {
        out.fill(f32::NAN);
    }
}
