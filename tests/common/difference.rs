//! How far two results are apart.

/// The largest absolute difference; infinite where one is NaN, which no bound admits.
pub fn largest_difference(got: &[f32], expected: &[f32]) -> f32 {
    assert_eq!(got.len(), expected.len());
    let differences = got.iter().zip(expected).map(|(g, e)| (g - e).abs());
    differences.map(|d| if d.is_nan() { f32::INFINITY } else { d }).fold(0.0, f32::max)
}
