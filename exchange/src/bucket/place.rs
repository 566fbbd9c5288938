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
    type Values<'a>;
    /// Room there for as many float32 values.
    type Mean<'a>;
    /// Why a step cannot begin there. The residual is then as before, and another place can do it.
    type Error;

    /// Compresses a gradient; or, where one rank's indices are to count, chooses them if this rank may be it.
    fn compress(&self, of: &mut Bucket, values: Self::Values<'_>, leader: Option<Leader>) -> Result<(), Self::Error>;

    /// Takes this rank's values at the indices that all ranks agreed on out of the residual.
    fn take(&self, of: &mut Bucket) -> Result<(), ExchangeError>;

    /// `out` becomes what the last round means; refused where that is not finite. All ranks read the same bytes, so all refuse alike.
    /// Where they do, the host's mean becomes NaN, and a device's is not specified.
    fn mean(&self, of: &mut Bucket, last: &LastRound<'_>, out: Self::Mean<'_>) -> Result<Ran, ExchangeError>;
}

/// What the last round of an exchange brought.
#[derive(Debug)]
pub enum LastRound<'a> {
    /// All ranks' messages.
    Messages(Vec<&'a [u8]>),
    /// Their sum, as a message.
    Sum(Vec<u8>),
    /// AR-Topk's sums at the agreed indices.
    Values(Vec<f32>),
    /// Some rank has no part.
    Refused,
}

/// Memory of this process.
#[derive(Debug, Clone, Copy)]
pub struct Host;

impl Place for Host {
    type Values<'a> = &'a [f32];
    type Mean<'a> = &'a mut [f32];
    type Error = Infallible;

    fn compress(&self, of: &mut Bucket, values: &[f32], leader: Option<Leader>) -> Result<(), Infallible> {
        if let Err(error) = of.copy_to_host() {
            of.fail(&error);
            return Ok(());
        }
        let (step, reference, gradient) = (of.step, of.known_rate(), Gradient::F32(values));
        let Run { pipeline, rates, .. } = &mut of.run;
        if let Some(factors) = rates.factors(reference) {
            pipeline.rescale_layers(&factors);
        }
        rates.applied(reference);
        pipeline.mark();
        let done = match leader {
            None => pipeline.compress(gradient, step, &mut of.message).map(|done| done.energy),
            Some(leader) => pipeline.select(gradient, step, leader.may_be(of.member.rank)),
        };
        match done {
            Ok(energy) => of.energy = energy,
            Err(error) => of.excuse(&error),
        }
        Ok(())
    }

    fn take(&self, of: &mut Bucket) -> Result<(), ExchangeError> {
        of.energy = of.run.pipeline.take(&mut of.values)?;
        Ok(())
    }

    fn mean(&self, of: &mut Bucket, last: &LastRound<'_>, out: &mut [f32]) -> Result<Ran, ExchangeError> {
        let (step, pipeline) = (of.step.index, &mut of.run.pipeline);
        let read = match last {
            LastRound::Messages(messages) => pipeline.aggregate(messages, step, out).map(|()| true),
            LastRound::Sum(message) => pipeline.mean(message, step, out).map(|()| true),
            LastRound::Values(sums) => pipeline.scatter(sums, out).map(|()| true),
            LastRound::Refused => Ok(false),
        };
        match read {
            Ok(true) => Ok(Ran::Good),
            Ok(false) | Err(ReadError::Number { .. }) => {
                out.fill(f32::NAN);
                Ok(Ran::Refused)
            }
            Err(source) => Err(ExchangeError::Read { bucket: of.index, source }),
        }
    }
}
