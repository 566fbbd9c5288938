//! What compressing takes on a GPU, measured before the first step: one rank exchanges a bucket with itself, by the kernels and,
//! where a message crosses to the host, by the copies of a real step.

use crate::device::{BucketMemory, gpu};
use crate::guard::Failure;
use flexcomm_compression::pipeline::{Member, Step};
use flexcomm_domain::spec::CompressorSpec;
use flexcomm_domain::{CodecCost, CompressionRatio, Family, default_compressors};
use flexcomm_exchange::{Arrived, Bucket, HEAD_BYTES, NotOnDevice, Param, Status, head};
use flexcomm_gpu_kernels::bench::{RUNS, median};
use flexcomm_gpu_kernels::bucket::Gradient;
use flexcomm_gpu_kernels::{Allocation, DType, Gpu, OnStream, Span, Stream};
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Most values that are compressed: few enough for [`LIMIT_S`], and 30 MB of memory.
const MOST_VALUES: usize = 1 << 20;

/// No further compressor is measured after so many seconds of the device: all ranks wait for rank 0 to attach.
const LIMIT_S: f64 = 1.0;

/// Shares of kept values; from both follows what a kept one costs.
const RATIOS: [f64; 2] = [0.001, 0.1];

/// To compress and to decompress one message.
type Costs = [CodecCost; 2];

/// Of the default compressors that a device has kernels for; nothing, and a line in the log, where anything fails.
pub(crate) fn measure(ordinal: u32, model: &[Param]) -> BTreeMap<Family, Costs> {
    let caught = catch_unwind(AssertUnwindSafe(|| costs(ordinal, &cut(model))));
    let measured = caught.unwrap_or_else(|_| Err(Failure::Run("it panicked; see stderr".into())));
    measured.unwrap_or_else(|why| {
        tracing::info!("compression on CUDA device {ordinal} was not measured, and is priced as on a host: {why}");
        BTreeMap::new()
    })
}

/// As much of a model as is measured.
fn cut(model: &[Param]) -> Vec<Param> {
    let mut room = MOST_VALUES;
    let mut fit = |param: &Param| {
        let len = param.len.min(room);
        room -= len;
        Param { len, cols: if len == param.len { param.cols } else { 1 }, ..*param }
    };
    model.iter().map(&mut fit).filter(|param| param.len > 0).collect()
}

fn costs(ordinal: u32, params: &[Param]) -> Result<BTreeMap<Family, Costs>, Failure> {
    let (gpu, n) = (gpu(ordinal)?, params.iter().map(|param| param.len).sum::<usize>());
    // Spread over (-1, 1), with more small values than large ones.
    let value = |i: u32| (i.wrapping_mul(0x9e37_79b9) as i32 as f32 / 2f32.powi(31)).powi(3);
    let (gradient, out) = (gpu.allocate(4 * n as u64)?, gpu.allocate(4 * n as u64)?);
    gradient.write(&(0..n as u32).flat_map(|i| value(i).to_le_bytes()).collect::<Vec<u8>>())?;
    let (stream, mut costs, mut spent) = (gpu.stream()?, BTreeMap::new(), 0.0);
    let runs = (RUNS * n) as f64;
    // From the end of the list: casts and quantizers, of which the least is to be known, are what a slow device leaves out.
    for family in default_compressors().into_iter().rev() {
        if spent > LIMIT_S {
            break;
        }
        let at = |ratio: &f64| {
            let spec = family.at(CompressionRatio::new(*ratio)?)?;
            let bucket = Loopback::new(gpu, &stream, params, spec, gradient.span(), out.span());
            match bucket.and_then(|mut bucket| bucket.seconds(&stream)) {
                Ok(seconds) => Ok(Some((*ratio, seconds.map(|seconds| seconds / n as f64)))),
                Err(Failure::NotOnDevice(_)) => Ok(None),
                Err(why) => Err(why),
            }
        };
        let ratios: &[f64] = if family.has_ratio() { &RATIOS } else { &[1.0] };
        let points = ratios.iter().map(at).collect::<Result<Option<Vec<_>>, Failure>>()?.unwrap_or_default();
        let (Some(low), Some(high)) = (points.first(), points.last()) else { continue };
        spent += points.iter().map(|(_, [compress, decompress])| 2.0 * compress + decompress).sum::<f64>() * runs;
        let cost = |which: usize| {
            let line = CodecCost::through((low.0, low.1[which]), (high.0, high.1[which]));
            CodecCost::new(line.value_s, line.kept_s)
        };
        costs.insert(family, [cost(0)?, cost(1)?]);
    }
    Ok(costs)
}

/// A bucket whose messages go to itself.
struct Loopback<'a> {
    bucket: Bucket,
    gradient: Gradient,
    /// Of a message that stays on the device.
    block: Allocation<'a>,
    /// Of one that crosses to the host.
    part: Vec<u8>,
    out: Span,
    step: u64,
}

impl<'a> Loopback<'a> {
    fn new(
        gpu: &'static Gpu,
        stream: &Stream<'_>,
        params: &[Param],
        spec: CompressorSpec,
        gradient: Span,
        out: Span,
    ) -> Result<Self, Failure> {
        let mut bucket = Bucket::new(0, params.to_vec(), Member::alone(0), None)?;
        bucket.prepare(&spec, None)?;
        let memory = gpu.allocate(bucket.device_bytes().map_err(on_host)?)?;
        let span = memory.span();
        bucket.move_to_device(&stream.device(), Box::new(BucketMemory::new(gpu, span, memory))).map_err(on_host)?;
        let block = gpu.allocate(bucket.staying().map_or(0, |(bytes, _)| HEAD_BYTES + bytes) as u64)?;
        let gradient = Gradient { at: gradient, dtype: DType::F32, weights: (1.0, 1.0) };
        Ok(Self { bucket, gradient, block, part: Vec::new(), out, step: 0 })
    }

    /// To compress and to decompress, by the device's clock.
    fn seconds(&mut self, stream: &Stream<'_>) -> Result<[f64; 2], Failure> {
        let compress = median(|| stream.seconds(|device| self.compress(device)))?;
        let decompress = median(|| {
            self.compress(&stream.device())?;
            stream.seconds(|device| self.decompress(device))
        })?;
        Ok([compress, decompress])
    }

    /// A step that was begun before, and has not ended, does not count.
    fn compress(&mut self, device: &OnStream<'_>) -> Result<(), Failure> {
        self.step += 1;
        let step = Step { index: self.step, learning_rate: 1.0 };
        let mut round = self.bucket.begin(device, self.gradient, step, None).map_err(on_host)?;
        if self.bucket.stays() {
            let written = self.bucket.write_on(device, &head(0, Status::Ready), self.block.span());
            return written.map_err(on_host);
        }
        loop {
            self.part.resize(round.bytes, 0);
            self.bucket.write(&mut self.part);
            if round.last {
                return Ok(());
            }
            round = self.bucket.next(device, &Arrived { refused: false, parts: vec![&self.part] })?;
        }
    }

    fn decompress(&mut self, device: &OnStream<'_>) -> Result<(), Failure> {
        if self.bucket.stays() {
            return Ok(self.bucket.add_on(device, self.block.span(), HEAD_BYTES, self.out)?);
        }
        let arrived = Arrived { refused: false, parts: vec![&self.part] };
        Ok(self.bucket.finish(device, &arrived, self.out).map(drop)?)
    }
}

fn on_host(why: NotOnDevice) -> Failure {
    match why {
        NotOnDevice::Launch(error) => error.into(),
        other => Failure::not_on_device(other),
    }
}
