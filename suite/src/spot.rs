//! Whether kept curves are what this program trains here: the first steps of three settings are trained anew.

use crate::files;
use crate::fixed::{self, Curve, Curves, DENSE, Library, TEST_EVERY};
use crate::ranks::Recipe;
use anyhow::{Context, Result, ensure};
use std::path::Path;
use std::sync::{Mutex, PoisonError};

/// How far losses and bytes may be apart, as a share: processors of another kind round otherwise.
const TOLERANCE: f64 = 1e-3;

/// Dense and two others, which hang on the job: the jobs of all cells together have each.
fn chosen<'a>(recipe: &Recipe, curves: &'a Curves) -> Result<Vec<&'a Curve>> {
    let (dense, others): (Vec<_>, Vec<_>) = curves.curves.iter().partition(|curve| curve.setting == DENSE);
    let number = u64::from_str_radix(&files::digest(recipe)?, 16).context("read a digest")?;
    let first = number.checked_rem(others.len() as u64).unwrap_or_default() as usize;
    Ok(dense.into_iter().chain(others.iter().cycle().skip(first).take(others.len().min(2)).copied()).collect())
}

/// Trains a job's first steps, a test interval of them, by dense and two other settings, and compares test losses and bytes. A check
/// that passed with the same curves and program is remembered with the curves that are trained here.
///
/// # Errors
/// A curve that shows something else: it is of another program or of other images.
pub fn check(library: &Library, recipe: &Recipe, curves: &Curves, binary: &str) -> Result<()> {
    // Cells of one job come at once: the second finds what the first has left.
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _only = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let (passed, digest) = (fixed::file(&library.trained.join("checked"), recipe), files::digest(&(curves, binary))?);
    if files::read_json::<String>(&passed).ok().as_ref() == Some(&digest) {
        return Ok(());
    }
    let data = library.data.of(recipe.world)?;
    let kept = fixed::file(&library.kept, recipe);
    let path = if kept.exists() { kept } else { fixed::file(&library.trained, recipe) };
    for curve in chosen(recipe, curves)? {
        let setting = &curve.setting;
        let strategy = setting.parse().with_context(|| format!("read the strategy {setting}"))?;
        compare(curve, &fixed::train_until(TEST_EVERY, *recipe, &data, &(setting.clone(), strategy))?, &path)?;
    }
    files::write_json(&passed, &digest)
}

fn compare(curve: &Curve, begun: &Curve, path: &Path) -> Result<()> {
    let losses = &curve.losses[..curve.losses.len().min(begun.losses.len())];
    let (bytes, begun_bytes) = (bytes(curve), bytes(begun));
    ensure!(
        are_near(losses, &begun.losses) && are_near(&bytes, &begun_bytes),
        "{}: the curve of {} is of another program or of other images. Remove the file, and its curves are trained anew (minutes), \
         or name another folder (--curves). Its first test losses are {losses:?}, with {bytes:?} bytes in a step's collectives; \
         trained here, {:?} and {begun_bytes:?}",
        path.display(),
        curve.setting,
        begun.losses
    );
    Ok(())
}

fn are_near(a: &[f64], b: &[f64]) -> bool {
    let near = |(a, b): (&f64, &f64)| (a - b).abs() <= TOLERANCE * b.abs();
    a.len() == b.len() && a.iter().zip(b).all(near)
}

/// Of each bucket's collectives, one after the other.
fn bytes(curve: &Curve) -> Vec<f64> {
    curve.rounds.iter().flatten().map(|round| round.bytes).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixed::Shared;
    use crate::ranks::Model;
    use std::sync::Arc;
    use std::sync::atomic::AtomicBool;

    #[test]
    fn curves_that_are_not_what_is_trained_here_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let recipe = Recipe {
            model: Model::Convolutional,
            world: 2,
            momentum: 0.9,
            learning_rate: 0.05,
            batch: 32,
            steps: 50,
            seed: 1,
        };
        let library = |images: &[usize]| {
            let path = |name: &str| folder.path().join(name);
            Library::new(path("kept"), path("trained"), Shared::synthetic(images), Arc::new(AtomicBool::new(false)))
        };
        let data = library(&[2]).data.of(2).unwrap();
        let train = |setting: &str| fixed::train(recipe, &data, &(setting.to_owned(), setting.parse().unwrap()));
        let settings = [DENSE, "topk(k=0.01)+ef(vanilla)/allgather", "powersgd(rank=1)+ef(vanilla)/dense-ring"];
        let curves = Curves { recipe, curves: settings.map(|setting| train(setting).unwrap()).to_vec() };
        curves.write(&folder.path().join("kept")).unwrap();
        let refused = |change: &dyn Fn(&mut Curve)| {
            let mut other = curves.clone();
            change(&mut other.curves[1]);
            format!("{:#}", check(&library(&[2]), &recipe, &other, "a").unwrap_err())
        };
        for error in [refused(&|curve| curve.losses[1] *= 1.002), refused(&|curve| curve.rounds[1][0].bytes *= 1.002)] {
            for part in
                ["kept/convolutional-n2-m0.9-lr0.05-b32-t50-s1.json: the curve of topk(k=0.01)", "Remove the file"]
            {
                assert!(error.contains(part), "no {part:?} in {error}");
            }
        }
        check(&library(&[2]), &recipe, &curves, "a").unwrap();
        // Without images nothing can be trained: remembered, for these curves and this program.
        check(&library(&[]), &recipe, &curves, "a").unwrap();
        assert!(check(&library(&[]), &recipe, &curves, "b").is_err());
        // As another kind of processor rounds.
        let mut other = curves.clone();
        other.curves[0].losses[1] *= 1.0005;
        check(&library(&[2]), &recipe, &other, "a").unwrap();
        assert!(refused(&|curve| curve.losses[0] *= 1.002).contains("Remove the file"));
    }
}
