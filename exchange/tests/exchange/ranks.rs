//! Ranks in one process, and what a library of collectives would do between them.

#[allow(dead_code, unsafe_code)]
#[path = "../../../gpu-kernels/tests/kernels/emulated.rs"]
mod emulated;

pub use emulated::{Emulated, Memory};
use flexcomm_compression::pipeline::{Member, Step, add_elements};
use flexcomm_exchange::{
    Answers, Arrived, Bucket, DeviceBuffer, HEAD_BYTES, Host, How, Leader, NotOnDevice, Param, Ran, Round, Status, head,
};
use flexcomm_gpu_kernels::bucket::Gradient;
use flexcomm_gpu_kernels::{Copies, DType, LaunchError, Span};

/// Memory of the emulator, given to a bucket.
struct Given {
    device: Emulated,
    memory: Memory,
}

impl std::fmt::Debug for Given {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Given")
    }
}

impl DeviceBuffer for Given {
    fn span(&self) -> Span {
        self.memory.span()
    }

    fn fetch(&self, from: Span, to: &mut [u8]) -> Result<(), LaunchError> {
        self.device.download(from, to)
    }
}

pub fn device(seed: u64) -> Emulated {
    Emulated::new(seed).unwrap()
}

pub fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

/// A step of all ranks: how compressed, where, of what.
#[derive(Clone)]
pub struct Plan {
    pub at: Step,
    pub leader: Option<Leader>,
    pub gradients: Vec<Vec<f32>>,
    /// Of each rank's gradient, where that lies on a device.
    pub sides: Vec<Option<DType>>,
    /// Of the layers, where they are not all the step's.
    pub rates: Vec<f64>,
}

impl Plan {
    /// On the host.
    pub fn new(index: u64, gradients: Vec<Vec<f32>>) -> Self {
        let sides = vec![None; gradients.len()];
        Self { at: Step { index, learning_rate: 0.1 }, leader: None, gradients, sides, rates: Vec::new() }
    }

    pub fn rate(self, learning_rate: f64) -> Self {
        Self { at: Step { learning_rate, ..self.at }, ..self }
    }
}

/// What a step showed.
#[derive(Debug)]
pub struct Seen {
    /// Every rank's part of every round.
    pub parts: Vec<Vec<Vec<u8>>>,
    pub rounds: Vec<Round>,
    /// Of every round, see [`Bucket::fixed_bytes`]: the same on all ranks.
    pub fixed: Vec<usize>,
    /// How it ended on every rank, and the mean.
    pub ends: Vec<(Result<Ran, String>, Vec<f32>)>,
}

/// Buckets of so many ranks under one compressor.
pub fn ranks(spec: &str, world: u32, params: &[Param]) -> Vec<Bucket> {
    let bucket = |rank| {
        let member = Member { rank, world, ..Member::alone(7) };
        let mut bucket = Bucket::new(0, params.to_vec(), member, None).unwrap();
        bucket.prepare(&spec.parse().unwrap(), None).unwrap();
        bucket
    };
    (0..world).map(bucket).collect()
}

/// Gives a bucket its memory on the device.
pub fn settle(bucket: &mut Bucket, seed: u64) {
    if !bucket.is_on_device() {
        let memory = Memory::new(bucket.device_bytes().unwrap());
        bucket.move_to_device(&device(seed + 1), Box::new(Given { device: device(seed), memory })).unwrap();
    }
}

/// Where a rank's gradient lies; halves are its upper bits.
pub fn source(gradient: &[f32], dtype: DType) -> (Memory, Gradient) {
    let memory = match dtype {
        DType::F32 => Memory::of(gradient),
        _ => Memory::of(&gradient.iter().map(|x| (x.to_bits() >> 16) as u16).collect::<Vec<_>>()),
    };
    let at = memory.span();
    (memory, Gradient { at, dtype, weights: (1.0, 1.0) })
}

/// What arrives on every rank: of headers only what travels.
fn carry(round: Round, heads: &[Vec<u8>], parts: &[Vec<u8>]) -> Vec<u8> {
    match round.how {
        How::Gather => {
            heads.iter().zip(parts).flat_map(|(head, part)| [&head[..round.head_bytes()], part].concat()).collect()
        }
        How::Broadcast(root) => parts[root as usize].clone(),
        How::Refused => Vec::new(),
        How::Sum(element) => {
            let mut sum = parts[0].clone();
            parts[1..].iter().for_each(|part| add_elements(element, &mut sum, part));
            sum
        }
    }
}

/// This rank's part of a round, and the header that says whether there is one: of a message that stays on the device as the block
/// has it.
fn part(bucket: &mut Bucket, round: Round, seed: u64) -> (Vec<u8>, Vec<u8>) {
    if !bucket.stays() {
        let mut out = vec![1; round.bytes];
        bucket.write(&mut out);
        return (out, head(0, bucket.status()).to_vec());
    }
    let block = Memory::of(&vec![0xeeu8; HEAD_BYTES + round.bytes]);
    bucket.write_on(&device(seed), &head(0, Status::Ready), block.span()).unwrap();
    let bytes = block.bytes();
    (bytes[HEAD_BYTES..].to_vec(), bytes[..HEAD_BYTES].to_vec())
}

fn end(
    bucket: &mut Bucket,
    arrived: &Arrived<'_>,
    gradient: &[f32],
    (on_device, seed): (bool, u64),
) -> (Result<Ran, String>, Vec<f32>) {
    let text = |ran: Result<Ran, flexcomm_exchange::ExchangeError>| ran.map_err(|error| error.to_string());
    if !on_device {
        let mut out = gradient.to_vec();
        return (text(bucket.finish(&Host, arrived, &mut out)), out);
    }
    let out = Memory::of(gradient);
    if !bucket.stays() {
        return (text(bucket.finish(&device(seed), arrived, out.span())), out.f32s());
    }
    let Arrived { refused, parts } = arrived;
    let heads: Vec<Vec<u8>> = parts.iter().map(|part| [&[0; HEAD_BYTES][..], part].concat()).collect();
    let blocks = Memory::of(&heads.concat());
    bucket.add_on(&device(seed), blocks.span(), HEAD_BYTES, out.span()).unwrap();
    let span = bucket.outcome_on().unwrap();
    let mut outcome = vec![0; span.bytes() as usize];
    device(seed).download(span, &mut outcome).unwrap();
    let front = bucket.message_header_bytes();
    let headers: Vec<&[u8]> = parts.iter().map(|part| &part[..front]).collect();
    let said = Answers { refused: *refused, headers: &headers, outcome: &outcome };
    (text(bucket.judge(said)), out.f32s())
}

pub fn step(ranks: &mut [Bucket], plan: &Plan) -> Seen {
    let sources: Vec<_> =
        plan.gradients.iter().zip(&plan.sides).map(|(g, side)| side.map(|side| source(g, side))).collect();
    let mut rounds = Vec::new();
    for (rank, bucket) in ranks.iter_mut().enumerate() {
        let seed = plan.at.index + rank as u64;
        bucket.enter();
        bucket.layer_rates(&plan.rates).unwrap();
        let on_host = |bucket: &mut Bucket| {
            let Ok(round) = bucket.begin(&Host, &plan.gradients[rank], plan.at, plan.leader);
            round
        };
        rounds.push(match &sources[rank] {
            None => on_host(bucket),
            Some((_, given)) => {
                settle(bucket, seed);
                match bucket.begin(&device(seed), *given, plan.at, plan.leader) {
                    Ok(round) => round,
                    Err(NotOnDevice::Variance) => on_host(bucket),
                    Err(why) => panic!("{why}"),
                }
            }
        });
    }
    let on_device: Vec<bool> = ranks.iter().map(Bucket::is_on_device).collect();
    let mut seen = Seen { parts: Vec::new(), rounds: Vec::new(), fixed: Vec::new(), ends: Vec::new() };
    loop {
        let round = rounds[0];
        assert!(rounds.iter().all(|other| *other == round), "{rounds:?}");
        let (parts, heads): (Vec<_>, Vec<_>) =
            (0..).zip(ranks.iter_mut()).map(|(rank, bucket)| part(bucket, round, plan.at.index + rank)).unzip();
        let arrived = carry(round, &heads, &parts);
        seen.parts.push(parts);
        seen.rounds.push(round);
        let fixed = ranks[0].fixed_bytes();
        assert!(ranks.iter().all(|rank| rank.fixed_bytes() == fixed));
        seen.fixed.push(fixed);
        let views = round.split(0, ranks.len(), &arrived).unwrap();
        if round.last {
            let ends = ranks
                .iter_mut()
                .enumerate()
                .map(|(rank, bucket)| end(bucket, &views, &plan.gradients[rank], (on_device[rank], rank as u64)));
            seen.ends = ends.collect();
            return seen;
        }
        rounds = (0..)
            .zip(ranks.iter_mut())
            .map(|(rank, bucket)| match on_device[rank] {
                true => bucket.next(&device(rank as u64), &views).unwrap(),
                false => bucket.next(&Host, &views).unwrap(),
            })
            .collect();
    }
}
