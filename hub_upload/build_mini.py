"""Put the small embedding model into the package: bf16 weights, tokenizer, and a card with what was measured.

    python hub_upload/build_mini.py --pretrained runs/mini --model runs/mini-embeddings --corpus runs/documentation

`make mini` trains both first. The held-out documents and packages of the corpus are what the card's figures are measured on.
"""

from neobert_hf.hub.mini import main

if __name__ == "__main__":
    main()
