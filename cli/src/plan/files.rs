//! The files that `flexcomm plan` reads. Errors name file, line and value.

use super::gains::GainRow;
use anyhow::{Context, Result, bail, ensure};
use flexcomm_domain::{CompressionRatio, Gain, Link, LinkMatrix, Seconds};
use std::io::Read;
use std::path::Path;

/// Largest file that is read: a matrix of 4096 workers at 20 characters per cell has 336 MB; what people write
/// by hand or script is far smaller.
const MAX_BYTES: u64 = 64 << 20;

fn read(path: &Path) -> Result<String> {
    let what = || format!("failed to read {}", path.display());
    let mut text = String::new();
    // Not the size that the file claims: a pipe or a device has none.
    let size = std::fs::File::open(path).and_then(|file| file.take(MAX_BYTES + 1).read_to_string(&mut text));
    let size = size.with_context(what)? as u64;
    ensure!(size <= MAX_BYTES, "failed to read {}: it has more than {MAX_BYTES} bytes", path.display());
    Ok(text.trim_start_matches('\u{feff}').to_owned())
}

/// Lines with content, numbered from 1.
fn lines(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let numbered = text.lines().enumerate().map(|(i, line)| (i + 1, line.trim()));
    numbered.filter(|(_, line)| !line.is_empty() && !line.starts_with('#'))
}

/// Reads a file as one of the functions below, or another, reads its text.
pub(super) fn load<T, E>(path: &Path, parse: impl FnOnce(&str) -> Result<T, E>) -> Result<T>
where
    Result<T, E>: Context<T, E>,
{
    parse(&read(path)?).with_context(|| format!("failed to read {}", path.display()))
}

pub(super) fn parse_gains(text: &str) -> Result<Vec<GainRow>> {
    let mut lines = lines(text);
    let (number, header) = lines.next().context("it is empty; expected a header line cr,gain[,t_comp_s]")?;
    let columns: Vec<&str> = header.split(',').map(str::trim).collect();
    let timed = match columns[..] {
        ["cr", "gain"] => false,
        ["cr", "gain", "t_comp_s"] => true,
        _ => bail!("line {number}: header is {header:?}, expected cr,gain or cr,gain,t_comp_s"),
    };
    let rows: Result<Vec<GainRow>> =
        lines.map(|(n, line)| gain_row(line, timed).with_context(|| format!("line {n}"))).collect();
    let rows = rows?;
    ensure!(!rows.is_empty(), "it has a header but no ratios");
    let most = flexcomm_estimation::profile::MAX_POINTS;
    ensure!(rows.len() <= most, "it has {} ratios, at most {most} are used", rows.len());
    Ok(rows)
}

fn gain_row(line: &str, timed: bool) -> Result<GainRow> {
    let cells: Vec<&str> = line.split(',').map(str::trim).collect();
    let expected = if timed { 3 } else { 2 };
    ensure!(cells.len() == expected, "{line:?} has {} cells, expected {expected}", cells.len());
    let number =
        |what: &str, cell: &str| cell.parse::<f64>().ok().with_context(|| format!("{what} {cell:?} is not a number"));
    let t_comp_s = match cells.get(2) {
        None | Some(&"") => None,
        Some(cell) => Some(Seconds::new(number("t_comp_s", cell)?).context("t_comp_s")?.get()),
    };
    Ok(GainRow {
        cr: CompressionRatio::new(number("cr", cells[0])?)?,
        gain: Gain::new(number("gain", cells[1])?)?,
        t_comp_s,
    })
}

/// A line of a bucket file.
pub(super) struct BucketRow {
    pub(super) name: String,
    pub(super) values: u64,
    pub(super) energy: Option<f64>,
}

pub(super) fn parse_buckets(text: &str) -> Result<Vec<BucketRow>> {
    const HEADER: &str = "bucket,params[,energy]";
    let mut lines = lines(text);
    let (number, header) = lines.next().with_context(|| format!("it is empty; expected a header line {HEADER}"))?;
    let columns: Vec<&str> = header.split(',').map(str::trim).collect();
    let fits = matches!(columns[..], ["bucket", "params"] | ["bucket", "params", "energy"]);
    ensure!(fits, "line {number}: header is {header:?}, expected {HEADER}");
    let rows = lines.map(|(n, line)| bucket_row(line, &columns).with_context(|| format!("line {n}")));
    let rows = rows.collect::<Result<Vec<BucketRow>>>()?;
    let most = flexcomm_domain::MAX_BUCKETS;
    ensure!((1..=most).contains(&rows.len()), "it has {} buckets, allowed are 1 to {most}", rows.len());
    let given = rows.iter().filter(|row| row.energy.is_some()).count();
    ensure!(given == 0 || given == rows.len(), "{given} of {} buckets have an energy: give all or none", rows.len());
    Ok(rows)
}

fn bucket_row(line: &str, columns: &[&str]) -> Result<BucketRow> {
    let cells: Vec<&str> = line.split(',').map(str::trim).collect();
    ensure!(cells.len() == columns.len(), "{line:?} has {} cells, expected {}", cells.len(), columns.len());
    const ENERGY: std::ops::RangeInclusive<f64> = 1e-30..=1e30;
    let energy = |cell: &&str| match cell.parse::<f64>() {
        Ok(v) if ENERGY.contains(&v) => Ok(v),
        _ => bail!("energy {cell:?} is not a number from {:e} to {:e}", ENERGY.start(), ENERGY.end()),
    };
    Ok(BucketRow {
        name: cells[0].to_owned(),
        values: super::parse_count(cells[1]).map_err(anyhow::Error::msg).context("params")?,
        energy: cells.get(2).filter(|cell| !cell.is_empty()).map(energy).transpose()?,
    })
}

pub(super) fn parse_links(text: &str) -> Result<LinkMatrix> {
    let rows: Vec<(usize, Vec<&str>)> =
        lines(text).map(|(number, line)| (number, line.split(',').map(str::trim).collect())).collect();
    let n = rows.len();
    ensure!(n >= 1, "it is empty; expected N lines of N cells like 1ms/10gbit");
    let most = super::MAX_WORKERS;
    ensure!(n <= most as usize, "it has {n} lines, at most {most} workers are allowed");
    let mut cells = Vec::with_capacity(n * n);
    for (i, (number, row)) in rows.iter().enumerate() {
        ensure!(row.len() == n, "line {number}: it has {} cells, expected {n}, one per line of the file", row.len());
        for (j, cell) in row.iter().enumerate() {
            let link = if i == j { Ok(None) } else { link(cell).map(Some) };
            cells.push(link.with_context(|| format!("line {number}, cell {}: {cell:?}", j + 1))?);
        }
    }
    // The diagonal is not used; any valid link fills it.
    let filler = cells.iter().copied().flatten().next().map_or_else(|| Link::new(0.0, 1e9), Ok)?;
    Ok(LinkMatrix::from_fn(n, |i, j| cells[i * n + j].unwrap_or(filler))?)
}

fn link(cell: &str) -> Result<Link> {
    let (alpha, bandwidth) = cell.split_once('/').context("expected LATENCY/BANDWIDTH, for example 1ms/10gbit")?;
    Ok(Link { alpha: alpha.parse()?, bandwidth: bandwidth.parse()? })
}
