from batch_inference_pipeline.__main__ import main

main()
